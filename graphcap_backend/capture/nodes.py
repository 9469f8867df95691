"""Nodes of a captured graph, as plain data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, overload

if TYPE_CHECKING:
    from graphcap_backend.capture.diff import NodeDiff
    from graphcap_backend.capture.render import Detail

Dim3 = tuple[int, int, int]


class NodeKind(StrEnum):
    """What a node does when the graph is replayed."""

    KERNEL = "kernel"
    MEMCPY = "memcpy"
    MEMSET = "memset"
    HOST = "host"
    CHILD_GRAPH = "child_graph"
    EMPTY = "empty"
    EVENT_RECORD = "event_record"
    EVENT_WAIT = "event_wait"
    SEMAPHORE_SIGNAL = "semaphore_signal"
    SEMAPHORE_WAIT = "semaphore_wait"
    MEM_ALLOC = "mem_alloc"
    MEM_FREE = "mem_free"
    BATCH_MEM_OP = "batch_mem_op"
    CONDITIONAL = "conditional"
    UNKNOWN = "unknown"


@dataclass(frozen=True, kw_only=True, slots=True)
class Memcpy:
    """One copy: where from, where to, how much."""

    source: str
    """"device", "host", "array" or "unified"."""
    destination: str
    num_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Memset:
    """One fill: the value of an element, its size, and how much is filled."""

    value: int
    element_bytes: int
    num_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Conditional:
    """What a conditional node decides, and how its bodies lie in ``Node.body``."""

    decides: str
    """"if", "while" or "switch"; "unknown" where the driver cannot tell."""
    body_sizes: tuple[int, ...] = ()
    """Nodes of each body; the bodies follow one another in ``Node.body``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """One node of a captured graph.

    ``annotation`` is the merged scope the node was launched in; treat it as read-only.
    ``stack`` is "file:line:function" lines, innermost first, joined by newlines. ``sources``
    are all model lines that were fused into a compiled kernel, each "file:line:function". Nodes in
    a ``body`` have the labels of the node that they lie in.
    """

    index: int
    """Position in creation order; equals the low 32 bits of the CUPTI node id."""
    kind: NodeKind
    name: str
    grid: Dim3 | None = None
    block: Dim3 | None = None
    cluster: Dim3 | None = None
    shared_mem_bytes: int | None = None
    """Dynamic shared memory of a kernel."""
    dependencies: tuple[int, ...] = ()
    """Indices of the nodes this one waits for, ascending."""
    programmatic_dependencies: tuple[int, ...] = ()
    """The subset of ``dependencies`` whose edge is programmatic (dependent launch)."""
    memcpy: Memcpy | None = None
    memset: Memset | None = None
    mem_ops: tuple[str, ...] = ()
    """Operations of a batch memory op, in order ("wait_value_32", "write_value_64")."""
    alloc_bytes: int | None = None
    """Size of a memory allocation."""
    conditional: Conditional | None = None
    body: NodeList | None = None
    """Nodes of a child graph; or of a conditional's bodies, one after the other, with indices
    and dependencies that run on. None where the driver cannot list them."""
    annotation: Mapping[str, Any] | None = None
    stack: str | None = None
    sources: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    """Module paths ("blocks.3.mlp") fused into a compiled kernel, where the compiler kept them."""


class NodeList(Sequence[Node]):
    """Nodes of one captured graph in creation order. Immutable."""

    __slots__ = ("_nodes",)

    def __init__(self, nodes: Sequence[Node]) -> None:
        self._nodes = tuple(nodes)

    @overload
    def __getitem__(self, index: int) -> Node: ...
    @overload
    def __getitem__(self, index: slice) -> NodeList: ...
    def __getitem__(self, index: int | slice) -> Node | NodeList:
        if isinstance(index, slice):
            return NodeList(self._nodes[index])
        return self._nodes[index]

    def __len__(self) -> int:
        return len(self._nodes)

    def __iter__(self) -> Iterator[Node]:
        return iter(self._nodes)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, NodeList) and self._nodes == other._nodes

    def __hash__(self) -> int:
        return hash(tuple((node.kind, node.name) for node in self._nodes))

    def __repr__(self) -> str:
        return f"NodeList({len(self)} nodes)"

    def render(self, detail: Detail | None = None, **options: Any) -> str:
        """The list as text made for snapshots: the same capture gives the same text anywhere.

        No address, id, directory, counter, hash or version is in it. ``options`` are the fields
        of :class:`~graphcap_backend.capture.render.Detail` (``stacks=True``, ``shapes=False``).

        Raises:
            TypeError: an option is not known.
        """
        from graphcap_backend.capture.render import Detail, render

        return render(self, Detail.of(detail, options))

    def diff(self, other: NodeList, detail: Detail | None = None, **options: Any) -> NodeDiff:
        """What has to change in this list to become ``other``. False where they are equal.

        Nodes are matched by alignment, so one node more or less does not touch the others. What
        is compared is what ``render`` would show with the same options.

        Raises:
            TypeError: ``other`` is no NodeList, or an option is not known.
        """
        from graphcap_backend.capture.diff import diff
        from graphcap_backend.capture.render import Detail

        if not isinstance(other, NodeList):
            raise TypeError(
                f"diff() compares with another NodeList, as capture_nodes(g) gives it, found {type(other).__name__}"
            )
        return diff(self, other, Detail.of(detail, options))

    def to_dot(self, detail: Detail | None = None, **options: Any) -> str:
        """A graphviz digraph: an edge per dependency, a cluster per scope and per child graph."""
        from graphcap_backend.capture.dot import to_dot
        from graphcap_backend.capture.render import Detail

        return to_dot(self, Detail.of(detail, options))
