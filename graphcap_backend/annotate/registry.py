"""What a captured graph leaves behind, and the process-wide views of all of it."""

from __future__ import annotations

import gzip
import json
import os
import tempfile
from collections.abc import Callable, ItemsView, Iterator, Mapping, Sequence, ValuesView
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, TypeVar
from weakref import WeakValueDictionary

from graphcap_backend.annotate import cupti
from graphcap_backend.annotate.process import PROCESS
from graphcap_backend.annotate.scopes import merge_annotations
from graphcap_backend.annotate.shape import ShapedNode, exec_ids, lacks_source_id, without_ids
from graphcap_backend.annotate.stacks import (
    Launch,
    Provenance,
    StackFilter,
    describe,
    symbolize,
)
from graphcap_backend.errors import GraphcapError

if TYPE_CHECKING:
    from graphcap_backend.annotate.config import AnnotationConfig

_Value = TypeVar("_Value")
_LOW_32_BITS: Final = 0xFFFF_FFFF
_Reader = Callable[[], Sequence[ShapedNode]]


class GraphKeys(Protocol):
    """Identity of a captured graph. Holds no strong reference to it."""

    @property
    def source_graph_id(self) -> int:
        """High 32 bits of keys of the captured graph."""

    def exec_graph_id(self) -> int | None:
        """High 32 bits of keys of the executable graph now; None before it exists."""

    def alive(self) -> bool:
        """False once the graph was reset, captured anew or deleted."""


class Entry(NamedTuple):
    """One node of a sealed recording; the tracebacks are still raw."""

    node: int
    annotation: Mapping[str, Any] | None
    traceback: Any
    forward: Any
    """Traceback of the forward operator that a backward node comes from."""
    in_backward: bool
    """Whether an autograd node launched it."""


class _Ids(NamedTuple):
    """Node ids of a graph, each with the top-level node it stands for."""

    top_level: Mapping[int, int]
    all: Mapping[int, int]
    without_source: Mapping[int, int]
    """Those of the top level that are reported, or may be, without the source node's id."""


class GraphRecord:
    """What was recorded of one captured graph. Whoever holds it keeps the entries alive.

    Stacks are resolved when first asked for, all at once. Once ``keys`` say the graph is
    gone, the record is empty.

    Attributes:
        way: how nodes were found: "cupti", "edge_walk" or "host".
    """

    def __init__(
        self,
        *,
        way: str,
        config: AnnotationConfig,
        filter_paths: Sequence[str] | None,
        by_source: bool,
        keys: GraphKeys,
        entries: Callable[[], Sequence[Entry]],
        provenance: Provenance | None,
    ) -> None:
        self.way: Final = way
        self.keys: Final = keys
        self._by_source = by_source
        self._stacks = config.record_py_stacks
        self._filter_paths = filter_paths
        self._pending: Callable[[], Sequence[Entry]] | None = entries
        self._provenance = provenance
        self._annotations: dict[int, Mapping[str, Any]] = {}
        self._launches: dict[int, Launch] = {}
        self._read_shape: _Reader | None = None
        self._ids: _Ids | None = None
        self._body_keys: Mapping[int, int] = {}

    def annotation(self, node: int) -> Mapping[str, Any] | None:
        """The merged annotation of a top-level node, or None."""
        self.resolve()
        return self._annotations.get(node)

    def stack(self, node: int) -> str | None:
        """Where a top-level node was launched, innermost first, or None."""
        launch = self._launch(node)
        return None if launch is None else launch.stack

    def sources(self, node: int) -> tuple[str, ...]:
        """The model lines a node comes from: all that were fused into a compiled kernel, the
        forward line of a backward node in eager mode, else the line that launched it."""
        launch = self._launch(node)
        return () if launch is None else launch.sources

    def modules(self, node: int) -> tuple[str, ...]:
        """Module paths fused into a compiled kernel, where the compiler kept them."""
        launch = self._launch(node)
        return () if launch is None else launch.modules

    def _launch(self, node: int) -> Launch | None:
        self.resolve()
        return self._launches.get(node) if self._stacks else None

    def read_shape_with(self, read: Callable[[], Sequence[ShapedNode]]) -> None:
        """Say how to read the graph's nodes, so that keys cover child graphs' bodies and
        leave out nodes that do no work. Called when keys are first asked for; it must hold
        no strong reference to the graph or to this record's holder."""
        self._read_shape, self._ids = read, None

    def resolve(self) -> None:
        """Turn raw tracebacks into text. Nothing to do the second time, or once the graph
        is gone."""
        with PROCESS.lock:
            if not self.keys.alive():
                self._clear()
            pending, self._pending = self._pending, None
            provenance, self._provenance = self._provenance, None
            if pending is None:
                return
            entries = pending()
            self._annotations = {e.node: e.annotation for e in entries if e.annotation is not None}
            if provenance is not None:
                self._resolve_stacks(entries, provenance)

    def _resolve_stacks(self, entries: Sequence[Entry], provenance: Provenance) -> None:
        raw = {id(tb): tb for e in entries for tb in (e.traceback, e.forward) if tb is not None}
        frames = dict(zip(raw, symbolize(list(raw.values())), strict=True))
        default = StackFilter(None, provenance)
        chosen = default if self._filter_paths is None else StackFilter(self._filter_paths, provenance)
        known: dict[int, Launch] = {key: describe(stack, provenance, chosen, default) for key, stack in frames.items()}
        for entry in entries:
            launch = known.get(id(entry.traceback))
            forward = known.get(id(entry.forward))
            if launch is None:
                # An edge walk knows no launching line, but may know the forward's.
                if forward is not None:
                    self._launches[entry.node] = forward
                continue
            traced = launch.backward_annotation if entry.in_backward else launch.annotation
            if traced is not None:
                annotation = merge_annotations(self._annotations.get(entry.node, {}), traced)
                if entry.in_backward:
                    annotation["autograd_phase"] = "backward"
                self._annotations[entry.node] = annotation
            self._launches[entry.node] = _behind(forward, launch) if forward else launch

    def add_body_keys(self, keys: Mapping[int, int]) -> None:
        """Source keys of nodes in bodies, which are graphs with ids of their own, each with the top-level
        node that it lies in. Executable graphs number bodies with the rest."""
        self._body_keys = keys

    def graph_id(self) -> int:
        """High 32 bits of the keys of this graph's top level now."""
        exec_id = None if self._by_source else self.keys.exec_graph_id()
        return self.keys.source_graph_id if exec_id is None else exec_id

    def node_at(self, key: int) -> int | None:
        """The top-level node that a key stands for now, or None."""
        for graph_id, nodes in self._nodes_by_graph():
            if graph_id == key >> 32:
                return nodes.get(key & _LOW_32_BITS)
        return self._body_keys.get(key)

    def nodes_by_key(self) -> dict[int, int]:
        """Keys of all nodes now, each with the top-level node it stands for."""
        keys = {graph_id << 32 | low: node for graph_id, nodes in self._nodes_by_graph() for low, node in nodes.items()}
        return {**keys, **self._body_keys}

    def _nodes_by_graph(self) -> list[tuple[int, Mapping[int, int]]]:
        """Ids that the graph is known by now, each with its nodes' ids."""
        self.resolve()
        if self._ids is None:
            self._ids = self._read_ids()
        exec_id = self.keys.exec_graph_id()
        if exec_id is None:
            return [(self.keys.source_graph_id, self._ids.top_level)]
        if not self._by_source:
            return [(exec_id, self._ids.all)]
        return [(self.keys.source_graph_id, self._ids.top_level), (exec_id, self._ids.without_source)]

    def _read_ids(self) -> _Ids:
        known = self._annotations.keys() | self._launches.keys()
        try:
            nodes = self._read_shape() if self._read_shape is not None else None
        except GraphcapError:
            nodes = None  # keys of the top level still hold
        if nodes is None:
            flat = {node: node for node in sorted(known)}
            return _Ids(flat, flat, {})
        lost = [] if self._by_source else [index for index in without_ids(nodes) if index in known]
        if lost:
            PROCESS.warn_once(
                "bodies without ids",
                f"work in the bodies of conditional nodes, and of child graphs after one, has no keys in "
                f"get_kernel_annotations() and get_kernel_py_stacks(): the ids that a replay reports it with are not "
                f"known. Here that is the work inside nodes {lost}; capture_nodes(g) labels it all the same",
            )
        paths = dict(exec_ids(nodes))
        return _Ids(
            {node_id: path[0] for node_id, path in paths.items() if len(path) == 1},
            {node_id: path[0] for node_id, path in paths.items()},
            {path[0]: path[0] for path in paths.values() if len(path) == 1 and lacks_source_id(nodes[path[0]].kind)},
        )

    def _clear(self) -> None:
        self._pending, self._provenance = None, None
        self._annotations, self._launches, self._ids = {}, {}, None
        self._read_shape, self._body_keys = None, {}


def _behind(forward: Launch, launch: Launch) -> Launch:
    """A backward node: the forward lines it comes from, then where backward was called."""
    if launch.is_compiled:
        return launch  # compiled backward: its origins name the forward already
    lines = [text for text in (forward.stack, launch.stack) if text]
    return Launch(stack="\n".join(lines) or None, sources=forward.sources, modules=forward.modules)


def _alive() -> list[GraphRecord]:
    with PROCESS.lock:
        records = list(PROCESS.records)
    return [record for record in records if record.keys.alive()]


class _View(Mapping[int, _Value]):
    """A live read-only mapping of node keys over all captured graphs that are alive.

    A look-up goes to the graph that had the key's graph id when ids were last compared, and compares
    the ids of all graphs only when that one has it no more.
    """

    def __init__(self, read: Callable[[GraphRecord, int], _Value | None]) -> None:
        self._read = read
        self._by_graph_id: WeakValueDictionary[int, GraphRecord] = WeakValueDictionary()

    def copy(self) -> dict[int, _Value]:
        """All entries as they are now."""
        with cupti.asked_together():
            keys = [(record, record.nodes_by_key()) for record in _alive()]
        return {
            key: value
            for record, nodes in keys
            for key, node in nodes.items()
            if (value := self._read(record, node)) is not None
        }

    def __getitem__(self, key: int) -> _Value:
        if not isinstance(key, int):
            raise KeyError(key)
        likely = self._by_graph_id.get(key >> 32)
        value = None if likely is None else self._value(likely, key)
        if value is None:
            value = self._search(key)
        if value is None:
            raise KeyError(key)
        return value

    def _value(self, record: GraphRecord, key: int) -> _Value | None:
        node = record.node_at(key) if record.keys.alive() else None
        return None if node is None else self._read(record, node)

    def _search(self, key: int) -> _Value | None:
        with cupti.asked_together():
            ids = [(record.graph_id(), record) for record in _alive()]
        self._by_graph_id = WeakValueDictionary(ids)
        values = (self._value(record, key) for _, record in ids)
        return next((value for value in values if value is not None), None)

    def __iter__(self) -> Iterator[int]:
        return iter(self.copy())

    def items(self) -> ItemsView[int, _Value]:
        return self.copy().items()

    def values(self) -> ValuesView[_Value]:
        return self.copy().values()

    def __len__(self) -> int:
        return len(self.copy())

    def __repr__(self) -> str:
        return repr(self.copy())


def _annotation_list(record: GraphRecord, node: int) -> list[Any] | None:
    annotation = record.annotation(node)
    return None if annotation is None else [dict(annotation)]


_ANNOTATIONS: Final = _View(_annotation_list)
_STACKS: Final = _View(GraphRecord.stack)


def get_kernel_annotations() -> Mapping[int, list[Any]]:
    """All recorded annotations: (graph id << 32) | node id to a list of one dict.

    A live, read-only view. Under ``key_by="exec"`` the graph id is that of the executable
    graph now, so keys follow every ``instantiate()``; before the first it is the captured
    graph's. Entries are gone with their graph.
    """
    return _ANNOTATIONS


def get_kernel_py_stacks() -> Mapping[int, str]:
    """All recorded stacks: (graph id << 32) | node id to "file:line:function" lines,
    innermost first. A live, read-only view, keyed as ``get_kernel_annotations``."""
    return _STACKS


def resolve_pending_annotations() -> None:
    """Resolve every stack recorded so far now, instead of when it is first read."""
    for record in _alive():
        record.resolve()


def dump_kernel_py_stacks(path: str | os.PathLike[str]) -> None:
    """Write all recorded stacks to a gzip-compressed JSON file: decimal key to stack.

    The file is there in whole or not at all; one that was there before is replaced.

    Raises:
        OSError: it can't be written.
    """
    stacks = _STACKS.copy()
    target = Path(path)
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=".graphcap-")
    try:
        with os.fdopen(handle, "wb") as file, gzip.open(file, "wt", encoding="utf-8") as text:
            json.dump(stacks, text)
        Path(name).replace(target)
    except BaseException:
        Path(name).unlink()
        raise


def load_kernel_py_stacks(path: str | os.PathLike[str]) -> dict[int, str]:
    """What ``dump_kernel_py_stacks`` wrote.

    Raises:
        OSError: there is no such file, or it is no gzip file.
        ValueError: it holds something else.
    """
    with gzip.open(path, "rt", encoding="utf-8") as text:
        loaded = json.load(text)
    if not isinstance(loaded, dict) or not all(
        key.isdecimal() and isinstance(stack, str) for key, stack in loaded.items()
    ):
        raise ValueError(f"{os.fspath(path)} holds no stacks; expected decimal keys to text")
    return {int(key): stack for key, stack in loaded.items()}


def is_available() -> bool:
    """Whether annotations of CUDA captures can be recorded: there is a GPU, and CUPTI or
    cuda-bindings to find nodes with. Captures into a HostGraph can always be annotated."""
    import torch

    if not torch.cuda.is_available():
        return False
    from graphcap_backend.annotate import edge_walk

    return cupti.is_loadable() or edge_walk.is_usable()
