"""A capture in a file: all that is known of it, to be read without CUDA and without the model."""

from __future__ import annotations

import contextlib
import linecache
import os
import platform
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from graphcap_backend.capture.nodes import NodeList
from graphcap_backend.capture.skip import SkipReason
from graphcap_backend.errors import GraphcapError
from graphcap_backend.files import written_whole
from graphcap_backend.report import PartReport, Report, report
from graphcap_backend.show.profile import Profile

if TYPE_CHECKING:
    from graphcap_backend.capture.record import CapturedGraph

_CONTEXT_LINES = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedGraph:
    """One captured graph."""

    name: str
    """Name of the part it was captured for, numbered where that has several."""
    way: str | None
    """How nodes found their scopes and stacks; None when not recorded."""
    source_graph_id: int
    exec_graph_id: int | None
    """High 32 bits of the graph node ids that its replays carried when it was saved."""
    nodes: NodeList


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedPart:
    """One row of the report; the fields of :class:`PartReport`, with graphs by position."""

    name: str
    kind: str
    partition: int
    num_partitions: int
    state: str
    reasons: tuple[SkipReason, ...]
    where: str | None
    num_keys: int
    graphs: tuple[int, ...]
    """Positions in the capture's ``graphs``."""
    num_nodes: int
    num_bytes: int
    num_replays: int
    fallbacks: Mapping[str, int]
    way: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedCapture:
    """What a capture knew when it was saved."""

    versions: Mapping[str, str]
    """Of graphcap, Python, torch and, where there is a GPU, CUDA, driver and device."""
    graphs: tuple[SavedGraph, ...]
    parts: tuple[SavedPart, ...] = ()
    """Rows of the report; none for a graph captured by hand."""
    source_text: Mapping[str, Mapping[int, str]] = field(default_factory=dict)
    """Text of the lines that sources and stacks name, and of those around: file to line number to text."""
    profile: Profile | None = None
    """Times of the nodes, if a profile was saved."""

    @property
    def num_nodes(self) -> int:
        return sum(len(graph.nodes) for graph in self.graphs)


def save_capture(path: str | os.PathLike[str], compiled_or_graph: Any) -> SavedCapture:
    """Save what is known of captured graphs to one JSON file; a name that ends in ".gz" is compressed.

    The file is there in whole or not at all; one that was there before is replaced. Annotation values
    that JSON does not know are saved as their ``repr``. Warns when there is nothing to save.

    Args:
        compiled_or_graph: a function or module compiled with the graphcap backend, or its report; a graph
            captured by ``graph``; or what :func:`profile_replays` or :func:`load_capture` gave.

    Raises:
        ValueError, GraphcapError: it is none of these.
        OSError: the file can't be written.
    """
    from graphcap_backend.show.saved_json import to_json

    capture = snapshot(compiled_or_graph, "save_capture(path, compiled_or_graph)")
    if not capture.graphs and not capture.parts and not isinstance(compiled_or_graph, SavedCapture):
        warnings.warn("the saved capture is empty: nothing was compiled so far, see report(compiled)", stacklevel=2)
    with written_whole(path) as file:
        to_json(capture, file)
    return capture


def load_capture(path: str | os.PathLike[str]) -> SavedCapture:
    """What :func:`save_capture` saved. Needs neither CUDA nor the model.

    Raises:
        SavedCaptureError: the file is cut off, of another version, or no saved capture.
        OSError: there is no such file.
    """
    from graphcap_backend.show.saved_json import from_json

    return from_json(path)


def snapshot(compiled_or_graph: Any, call: str) -> SavedCapture:
    """All that is known now, as data. Arguments and errors as for :func:`save_capture`; errors name ``call``."""
    from graphcap_backend.capture.record import capture_nodes, captured_graph

    if isinstance(compiled_or_graph, SavedCapture):
        return compiled_or_graph
    if isinstance(compiled_or_graph, Profile):
        return replace(compiled_or_graph.capture, profile=compiled_or_graph)
    captured = captured_graph(compiled_or_graph)
    if captured is not None:
        return _with_sources([_saved_graph(captured, "graph")], ())
    if hasattr(compiled_or_graph, "capture_begin"):
        capture_nodes(compiled_or_graph)  # raises, saying what such a graph is expected to be
    if isinstance(compiled_or_graph, (str, os.PathLike)):
        raise ValueError(
            f"expected {call}, found the path {os.fspath(compiled_or_graph)!r} in place of what was captured; "
            "load_capture(path) gives what a file holds"
        )
    found = compiled_or_graph if isinstance(compiled_or_graph, Report) else report_of(compiled_or_graph, call)
    rows = found.parts
    _learn_ids(captured_graph(graph) for row in rows for graph in row.graphs)
    graphs: list[SavedGraph] = []
    parts = []
    for row in rows:
        first = len(graphs)
        for number, graph in enumerate(row.graphs):
            captured = captured_graph(graph)
            if captured is not None:
                name = row.name if len(row.graphs) == 1 else f"{row.name}, graph {number + 1}"
                graphs.append(_saved_graph(captured, name))
        parts.append(_saved_part(row, range(first, len(graphs))))
    return _with_sources(graphs, parts)


def report_of(compiled: Any, call: str) -> Report:
    """``report(compiled)``, for a function that is called as ``call``.

    Raises:
        ValueError: ``compiled`` is nothing that the graphcap backend compiled; the message names ``call``.
    """
    try:
        return report(compiled)
    except ValueError:
        raise ValueError(
            f"{call} takes what torch.compile(..., backend='graphcap') returned, found {type(compiled).__name__}"
        ) from None


def saved_graphs_of_this_process() -> list[SavedGraph]:
    """All captured graphs that are alive."""
    from graphcap_backend.capture.process import PROCESS

    with PROCESS.lock:
        captured = [each for each in PROCESS.captured.values() if each.keys.alive()]
    _learn_ids(captured)
    return [_saved_graph(each, f"graph {number}") for number, each in enumerate(captured)]


def _learn_ids(captured: Iterable[CapturedGraph | None]) -> None:
    """Ask for the ids of all graphs at once: one by one each may take milliseconds. They are remembered."""
    from graphcap_backend.annotate import cupti

    with cupti.asked_together(), contextlib.suppress(GraphcapError):
        for each in captured:
            if each is not None:
                each.keys.exec_graph_id()


def _saved_graph(captured: CapturedGraph, name: str) -> SavedGraph:
    keys = captured.keys
    try:
        exec_id = keys.exec_graph_id()
    except GraphcapError:
        exec_id = None
    return SavedGraph(
        name=name,
        way=captured.way,
        source_graph_id=keys.source_graph_id,
        exec_graph_id=exec_id,
        nodes=captured.nodes(),
    )


def _saved_part(row: PartReport, graphs: Iterable[int]) -> SavedPart:
    return SavedPart(
        name=row.name,
        kind=row.kind,
        partition=row.partition,
        num_partitions=row.num_partitions,
        state=row.state,
        reasons=row.reasons,
        where=row.where,
        num_keys=row.num_keys,
        graphs=tuple(graphs),
        num_nodes=row.num_nodes,
        num_bytes=row.num_bytes,
        num_replays=row.num_replays,
        fallbacks=dict(row.fallbacks),
        way=row.way,
    )


def _with_sources(graphs: Iterable[SavedGraph], parts: Iterable[SavedPart]) -> SavedCapture:
    graphs = tuple(graphs)
    return SavedCapture(versions=_versions(), graphs=graphs, parts=tuple(parts), source_text=_source_text(graphs))


def _source_text(graphs: Iterable[SavedGraph]) -> dict[str, dict[int, str]]:
    named: dict[str, set[int]] = {}
    frames = {
        frame for graph in graphs for node in graph.nodes for frame in (*node.sources, *(node.stack or "").splitlines())
    }
    for frame in frames:
        place = split_frame(frame)
        if place is not None:
            named.setdefault(place[0], set()).add(place[1])
    text: dict[str, dict[int, str]] = {}
    for file in sorted(named):
        lines = linecache.getlines(file)
        around = {
            number
            for line in named[file]
            for number in range(max(1, line - _CONTEXT_LINES), min(len(lines), line + _CONTEXT_LINES) + 1)
        }
        if around:
            text[file] = {number: lines[number - 1].rstrip("\n") for number in sorted(around)}
    return text


def split_frame(frame: str) -> tuple[str, int, str] | None:
    """File, line and function of "file:line:function"; None for other text."""
    parts = frame.rsplit(":", 2)
    if len(parts) != 3 or not parts[1].isdecimal():
        return None
    return parts[0], int(parts[1]), parts[2]


def _versions() -> dict[str, str]:
    from importlib.metadata import version

    import torch

    found = {"graphcap": version("graphcap-backend"), "python": platform.python_version(), "torch": torch.__version__}
    if torch.version.cuda is not None:
        found["cuda"] = torch.version.cuda
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        from graphcap_backend.annotate.edge_walk import driver_version

        driver = driver_version()
        found["driver"] = f"CUDA {driver // 1000}.{driver % 1000 // 10}"
        found["device"] = torch.cuda.get_device_name()
    return found
