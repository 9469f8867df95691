"""Which node of which captured graph each GPU event of a trace is. Pure.

Where the trace has graph node ids, they say. Where it has none (torch 2.11), all events of a replay share
one correlation id, and they are matched with a graph whose nodes do the same work:

    - as many events as nodes of each kernel name (with its launch shape) or copy,
    - events of one name go to nodes of that name in order of time, if every two of those nodes
      depend on one another: only then the order is fixed,
    - no node starts before one that it depends on.

What is left is uncertain and stays without a node.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple, Protocol

from graphcap_backend.annotate.shape import exec_ids

Path = tuple[int, ...]
"""Indices that lead to a node: one at the top level, the child node's first for a node in a body."""

_CATEGORIES = {"kernel": "kernel", "memcpy": "gpu_memcpy", "memset": "gpu_memset"}


class TraceNode(Protocol):
    """What is needed of a captured node."""

    @property
    def kind(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def grid(self) -> tuple[int, int, int] | None: ...
    @property
    def block(self) -> tuple[int, int, int] | None: ...
    @property
    def dependencies(self) -> tuple[int, ...]: ...
    @property
    def memcpy(self) -> Any: ...
    @property
    def memset(self) -> Any: ...
    @property
    def body(self) -> Sequence[TraceNode] | None: ...
    @property
    def annotation(self) -> Mapping[str, Any] | None: ...
    @property
    def stack(self) -> str | None: ...
    @property
    def sources(self) -> tuple[str, ...]: ...
    @property
    def modules(self) -> tuple[str, ...]: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class TraceGraph:
    """A captured graph that replays in the trace may be of."""

    name: str
    exec_id: int | None
    """Id of the executable graph in the process that was traced; None where it is not known."""
    nodes: Sequence[TraceNode]


class GpuEvent(NamedTuple):
    """A kernel, copy or fill in the trace."""

    number: int
    """Position among all events of the file."""
    correlation: int
    category: str
    name: str
    start: float
    node_id: int
    """(executable graph id << 32) | node id; 0 where the trace has none."""
    shape: Hashable
    """Grid and block of a kernel, bytes of a copy; None where the trace has none."""


class Reason(StrEnum):
    """Why events of a replay got no label."""

    NO_GRAPH = "no captured graph has these kernels"
    SEVERAL_GRAPHS = "several captured graphs with different lines have these kernels"
    PARALLEL = "equal kernels on parallel branches"
    UNKNOWN_ID = "graph node ids of a graph that was not captured here, or of a conditional body"


@dataclass(slots=True)
class Matches:
    """What became of the GPU events of all replays."""

    nodes: dict[int, tuple[int, Path]] = field(default_factory=dict)
    """Number of the event to graph and node."""
    without_stack: set[int] = field(default_factory=set)
    """Events of nodes that graphs with equal lines but other callers have as well: whose call this was is not known."""
    num_by_id: int = 0
    unlabelled: Counter[Reason] = field(default_factory=Counter)


def match(replays: Iterable[Sequence[GpuEvent]], graphs: Sequence[TraceGraph]) -> Matches:
    """Find the node of every event of ``replays``, each the events of one replay."""
    shapes = [_Shape(number, graph) for number, graph in enumerate(graphs)]
    by_id = {
        graph.exec_id << 32 | node_id: (number, path)
        for number, graph in enumerate(graphs)
        if graph.exec_id is not None
        for node_id, path in exec_ids(graph.nodes)
    }
    found = Matches()
    rest = []
    for replay in replays:
        if not _match_by_id(replay, by_id, shapes, found):
            rest.append(replay)
    if found.num_by_id:  # the ids in this trace are those of these graphs: others are other graphs
        for replay in [each for each in rest if any(event.node_id for event in each)]:
            found.unlabelled[Reason.UNKNOWN_ID] += len(replay)
        rest = [each for each in rest if not any(event.node_id for event in each)]
    by_work: dict[Hashable, list[_Shape]] = defaultdict(list)
    for shape in shapes:
        by_work[shape.names].append(shape)
    for replay in rest:
        work = frozenset(Counter((event.category, _name_of(event)) for event in replay).items())
        _match_by_order(replay, by_work.get(work, []), graphs, found)
    return found


def _name_of(event: GpuEvent) -> str:
    return event.name if event.category == "kernel" else ""


def _match_by_id(
    replay: Sequence[GpuEvent],
    by_id: Mapping[int, tuple[int, Path]],
    shapes: Sequence[_Shape],
    found: Matches,
) -> bool:
    matched: dict[int, tuple[int, Path]] = {}
    for event in replay:
        node = by_id.get(event.node_id)
        if node is None:
            continue
        # Ids of another process may be the same by chance; names then are not.
        if shapes[node[0]].work_of(node[1]) != (event.category, _name_of(event)):
            return False
        matched[event.number] = node
    num_unknown = len(replay) - len(matched)
    if not matched or (num_unknown and not all(shapes[graph].is_conditional for graph, _ in matched.values())):
        return False
    found.nodes.update(matched)
    found.num_by_id += len(matched)
    found.unlabelled[Reason.UNKNOWN_ID] += num_unknown
    return True


def _match_by_order(
    replay: Sequence[GpuEvent], candidates: Sequence[_Shape], graphs: Sequence[TraceGraph], found: Matches
) -> None:
    matches = [(shape.number, matched) for shape in candidates if (matched := shape.match(replay)) is not None]
    if not matches:
        found.unlabelled[Reason.NO_GRAPH] += len(replay)
        return
    first, matched = matches[0]
    for other, its in matches[1:]:
        if its != matched or not _same_labels(graphs[first], graphs[other], matched.values()):
            found.unlabelled[Reason.SEVERAL_GRAPHS] += len(replay)
            return
        found.without_stack.update(
            number for number, path in matched.items() if _stack(graphs[first], path) != _stack(graphs[other], path)
        )
    found.nodes.update((number, (first, path)) for number, path in matched.items())
    found.unlabelled[Reason.PARALLEL] += len(replay) - len(matched)


def _same_labels(one: TraceGraph, other: TraceGraph, paths: Iterable[Path]) -> bool:
    if one.nodes is other.nodes:
        return True
    for index in {path[0] for path in paths}:
        mine, its = one.nodes[index], other.nodes[index]
        if (mine.annotation, mine.sources) != (its.annotation, its.sources):
            return False
        if not mine.sources and mine.stack != its.stack:
            return False
    return True


def _stack(graph: TraceGraph, path: Path) -> str | None:
    return graph.nodes[path[0]].stack


class _Work(NamedTuple):
    """A node that shows up in a trace."""

    path: Path
    category: str
    name: str
    shape: Hashable


class _Shape:
    """The work of one graph, and what depends on what."""

    def __init__(self, number: int, graph: TraceGraph) -> None:
        self.number = number
        self.is_conditional = any(node.kind == "conditional" for node in graph.nodes)
        """Whether it runs nodes whose ids are not known."""
        self._order = _Order(graph.nodes)
        self._work = {
            path: _Work(path, category, _shown_name(node), _shape_of(node))
            for _, path in exec_ids(graph.nodes)
            if (category := _CATEGORIES.get((node := _at(graph.nodes, path)).kind)) is not None
        }
        self.names = frozenset(Counter((work.category, work.name) for work in self._work.values()).items())

    def work_of(self, path: Path) -> tuple[str, str] | None:
        work = self._work.get(path)
        return None if work is None else (work.category, work.name)

    def match(self, replay: Sequence[GpuEvent]) -> dict[int, Path] | None:
        """Event number to node for a replay with the same names; None if it can't be of this graph."""
        all_work = list(self._work.values())
        shapes = [(one.category, one.shape) for one in all_work] + [(one.category, one.shape) for one in replay]
        shapeless = {category for category, shape in shapes if shape is None}
        nodes: dict[Hashable, list[_Work]] = defaultdict(list)
        for work in all_work:
            nodes[work.category, work.name, None if work.category in shapeless else work.shape].append(work)
        events: dict[Hashable, list[GpuEvent]] = defaultdict(list)
        for event in sorted(replay, key=lambda event: (event.start, event.number)):
            shape = None if event.category in shapeless else event.shape
            events[event.category, _name_of(event), shape].append(event)
        if {key: len(group) for key, group in nodes.items()} != {key: len(group) for key, group in events.items()}:
            return None
        return self._pair(nodes, events)

    def _pair(
        self, nodes: Mapping[Hashable, Sequence[_Work]], events: Mapping[Hashable, Sequence[GpuEvent]]
    ) -> dict[int, Path] | None:
        numbers: dict[int, Path] = {}
        starts: dict[Path, float] = {}
        for key, group in nodes.items():
            ordered = sorted(group, key=lambda work: work.path)
            if not self._order.is_chain([work.path for work in ordered]):
                continue
            for work, event in zip(ordered, events[key], strict=True):
                numbers[event.number] = work.path
                starts[work.path] = event.start
        return numbers if self._order.agrees(starts) else None


class _Order:
    """What must run before what, in one graph with the bodies of its child nodes."""

    def __init__(self, nodes: Sequence[TraceNode]) -> None:
        self._nodes = nodes
        self._bodies: dict[Path, list[int]] = {(): _ancestors(nodes)}

    def is_chain(self, paths: Sequence[Path]) -> bool:
        """Whether each of ``paths`` (ascending) waits for the one before it."""
        return all(self._is_before(a, b) for a, b in itertools.pairwise(paths))

    def _is_before(self, first: Path, second: Path) -> bool:
        depth = 0
        while depth < min(len(first), len(second)) - 1 and first[depth] == second[depth]:
            depth += 1
        above = first[:depth]
        return bool(self._ancestors_in(above)[second[depth]] >> first[depth] & 1)

    def _ancestors_in(self, above: Path) -> list[int]:
        known = self._bodies.get(above)
        if known is None:
            known = self._bodies[above] = _ancestors(_at(self._nodes, above).body or ())
        return known

    def agrees(self, starts: Mapping[Path, float]) -> bool:
        """Whether no node of the top level started before one that it waits for."""
        latest: list[float] = []
        for index, node in enumerate(self._nodes):
            before = max((latest[other] for other in node.dependencies), default=0.0)
            start = starts.get((index,))
            if start is not None and start < before:
                return False
            latest.append(before if start is None else start)
        return True


def _ancestors(nodes: Sequence[TraceNode]) -> list[int]:
    """For each node a set, as bits, of the nodes it waits for, directly or not."""
    found: list[int] = []
    for node in nodes:
        bits = 0
        for other in node.dependencies:
            bits |= found[other] | 1 << other
        found.append(bits)
    return found


def _at(nodes: Sequence[TraceNode], path: Path) -> TraceNode:
    node = nodes[path[0]]
    for index in path[1:]:
        assert node.body is not None
        node = node.body[index]
    return node


def _shown_name(node: TraceNode) -> str:
    """The name as Kineto writes it."""
    if node.kind != "kernel":
        return ""
    if not node.name.startswith("_Z"):
        return node.name
    import torch

    return str(torch._C._demangle(node.name))


def _shape_of(node: TraceNode) -> Hashable:
    if node.kind == "kernel":
        return None if node.grid is None or node.block is None else (*node.grid, *node.block)
    what = node.memcpy if node.kind == "memcpy" else node.memset
    return None if what is None else what.num_bytes
