"""What the page's script works on: a capture as JSON, every text once.

::

    {"clock": "cuda" | "cpu" | null, "numCalls": 20,
     "files": [{"path": ..., "lines": {"10": text}}],
     "frames": [{"file": 0, "line": 10, "function": "forward"} or {"text": ...}],
     "names": [{"full": ..., "short": ...}], "stacks": [[frame, ...]], "annotations": [text],
     "graphs": [{"name": ..., "way": ...}],
     "outside": [{"name": ..., "ns": ..., "count": ...}],
     "nodes": [{"graph": 0, "at": "3", "kind": "kernel", "name": 0, "sources": [frame, ...], ...}]}

``at`` is the index of a node, after those of the child nodes it is inside: "5.0". Such an inner node has
``depth`` and the labels of its outermost node, which are what is known of it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any, Generic, TypeVar

from graphcap_backend.annotate.profile import Timing, scope_names
from graphcap_backend.capture.kernel_names import display_name
from graphcap_backend.capture.nodes import Node, NodeList
from graphcap_backend.show.saved import SavedCapture, split_frame

_Key = TypeVar("_Key", bound=Hashable)
_Path = tuple[int, ...]


def page_data(capture: SavedCapture) -> dict[str, Any]:
    """``capture`` as the page's script reads it."""
    return _PageData(capture).whole()


class _Table(Generic[_Key]):
    """Entries by key, each once; others refer to them by position."""

    def __init__(self, entry: Callable[[_Key], Any]) -> None:
        self._entry = entry
        self._positions: dict[_Key, int] = {}
        self.entries: list[Any] = []

    def __getitem__(self, key: _Key) -> int:
        position = self._positions.get(key)
        if position is None:
            entry = self._entry(key)
            position = self._positions[key] = len(self.entries)
            self.entries.append(entry)
        return position


class _PageData:
    def __init__(self, capture: SavedCapture) -> None:
        self._capture = capture
        self._files: _Table[str] = _Table(self._file)
        self._frames: _Table[str] = _Table(self._frame)
        self._stacks: _Table[str] = _Table(lambda stack: [self._frames[frame] for frame in stack.splitlines()])
        self._names: _Table[str] = _Table(lambda name: {"full": name, "short": display_name(name)})
        self._annotations: _Table[str] = _Table(lambda text: text)
        times = capture.profile.times if capture.profile is not None else ()
        self._timings: dict[tuple[int, _Path], Timing] = {(time.graph, time.path): time.timing for time in times}

    def whole(self) -> dict[str, Any]:
        profile = self._capture.profile
        nodes = [row for graph in range(len(self._capture.graphs)) for row in self._graph_rows(graph)]
        return {
            "clock": profile.clock if profile is not None else None,
            "numCalls": profile.num_calls if profile is not None else 0,
            "graphs": [{"name": graph.name, "way": graph.way} for graph in self._capture.graphs],
            "nodes": nodes,
            "outside": [
                {"name": outside.name, "ns": outside.timing.total_ns, "count": outside.timing.count}
                for outside in (profile.outside if profile is not None else ())
            ],
            "files": self._files.entries,
            "frames": self._frames.entries,
            "names": self._names.entries,
            "stacks": self._stacks.entries,
            "annotations": self._annotations.entries,
        }

    def _graph_rows(self, graph: int) -> Iterator[dict[str, Any]]:
        for node in self._capture.graphs[graph].nodes:
            labels = self._labels(node)
            yield self._row(node, graph, (node.index,)) | labels
            for path, inner in _inside(node.body, (node.index,)):
                yield self._row(inner, graph, path) | labels | {"depth": len(path) - 1}

    def _row(self, node: Node, graph: int, path: _Path) -> dict[str, Any]:
        row: dict[str, Any] = {
            "graph": graph,
            "at": ".".join(map(str, path)),
            "kind": str(node.kind),
            "name": self._names[node.name],
        }
        if node.dependencies:
            row["waits"] = node.dependencies
        if facts := dict(_facts(node)):
            row["facts"] = facts
        if timing := self._timings.get((graph, path)):
            row["timing"] = [timing.count, timing.total_ns, timing.min_ns, timing.max_ns]
        return row

    def _labels(self, node: Node) -> dict[str, Any]:
        labels: dict[str, Any] = {}
        if node.sources:
            labels["sources"] = [self._frames[frame] for frame in dict.fromkeys(node.sources)]
        if node.stack:
            labels["stack"] = self._stacks[node.stack]
        if node.modules:
            labels["modules"] = list(dict.fromkeys(node.modules))
        if node.annotation:
            labels["scopes"] = list(scope_names(node.annotation))
            text = json.dumps(node.annotation, indent=2, ensure_ascii=False, default=_readable)
            labels["annotation"] = self._annotations[text]
        return labels

    def _frame(self, frame: str) -> dict[str, Any]:
        place = split_frame(frame)
        if place is None:
            return {"text": frame}
        file, line, function = place
        return {"file": self._files[file], "line": line, "function": function}

    def _file(self, path: str) -> dict[str, Any]:
        return {"path": path, "lines": dict(self._capture.source_text.get(path, {}))}


def _inside(body: NodeList | None, outer: _Path) -> Iterator[tuple[_Path, Node]]:
    for node in body or ():
        path = (*outer, node.index)
        yield path, node
        yield from _inside(node.body, path)


def _facts(node: Node) -> Iterator[tuple[str, str]]:
    """What else there is to say of a node, in words."""
    if node.grid is not None:
        yield "grid", _dims(node.grid)
    if node.block is not None:
        yield "block", _dims(node.block)
    if node.cluster is not None:
        yield "cluster", _dims(node.cluster)
    if node.shared_mem_bytes:
        yield "dynamic shared memory", f"{node.shared_mem_bytes:,} bytes"
    if node.memcpy is not None:
        yield "copies", f"{node.memcpy.num_bytes:,} bytes, {node.memcpy.source} to {node.memcpy.destination}"
    if node.memset is not None:
        yield "fills", f"{node.memset.num_bytes:,} bytes with {node.memset.value:#x}"
    if node.alloc_bytes is not None:
        yield "allocates", f"{node.alloc_bytes:,} bytes"
    if node.mem_ops:
        yield "operations", ", ".join(node.mem_ops)
    if node.conditional is not None:
        yield "decides", node.conditional.decides
    if node.programmatic_dependencies:
        yield "programmatic launch after", ", ".join(map(str, node.programmatic_dependencies))


def _dims(dims: tuple[int, int, int]) -> str:
    return " x ".join(map(str, dims))


def _readable(value: object) -> object:
    return dict(value) if isinstance(value, Mapping) else repr(value)
