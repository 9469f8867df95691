"""Scopes, source lines and stacks for the GPU events of a trace that ``torch.profiler`` exported.

Two passes over the file: the first finds out which event is which node, the second copies the text and
rewrites those events. Only what the first has to remember of GPU events is held in memory.
"""

from __future__ import annotations

import json
import os
import re
from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from graphcap_backend.annotate.profile import scope_names
from graphcap_backend.annotate.trace_join import GpuEvent, Matches, Reason, TraceGraph, TraceNode, match
from graphcap_backend.annotate.trace_text import EndOfEvents, Event, pieces
from graphcap_backend.files import opened_text, written_whole

_GPU_CATEGORIES: Final = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
_LAUNCH_CATEGORIES: Final = frozenset({"cuda_runtime", "cuda_driver"})
_COPY_KERNEL: Final = re.compile(r"(memcpy|memset)\d*_post")
"""Seen with driver 580 on an H200: graphs copy few bytes on the device by a kernel "memcpy32_post"."""
_SCOPE_CATEGORY: Final = "graphcap_scope"
_SCOPE_LANES: Final = 1_000_000
"""Added to a stream's number for the lane that shows its scopes; no stream is numbered so high."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AnnotatedTrace:
    """What ``annotate_trace`` did. A replay's GPU event is labelled or counted in ``unlabelled``."""

    num_events: int
    num_replays: int
    """Graph replays with GPU events in the trace."""
    num_labelled: int
    num_labelled_by_id: int
    """The part of ``num_labelled`` that graph node ids decided; the rest went by order and names."""
    unlabelled: Mapping[str, int] = field(default_factory=dict)
    """Events of replays that kept to themselves which node they are, by reason."""

    @property
    def num_unlabelled(self) -> int:
        return sum(self.unlabelled.values())

    def __str__(self) -> str:
        ways = f"{self.num_labelled_by_id} by graph node id, {self.num_labelled - self.num_labelled_by_id} by order"
        text = f"{self.num_labelled} GPU events of {self.num_replays} replays labelled ({ways})"
        for reason, number in self.unlabelled.items():
            text += f"\n{number} left as they were: {reason}"
        return text


def label_trace(
    src: str | os.PathLike[str], dst: str | os.PathLike[str], graphs: Sequence[TraceGraph]
) -> AnnotatedTrace:
    """Copy the trace ``src`` to ``dst``, with labels on the GPU events of replays of ``graphs``.

    Each gets in its ``args``: "scope", "annotation", "source", "module", "stack" (innermost first),
    "graph" and "node". Work of a ``mark_stream`` scope moves to that scope's lane, as torch 2.15 does it
    ("original_stream" says where it ran), and per stream a lane of slices shows the scopes. All other
    events are copied as they are written in ``src``.

    Raises:
        ValueError: ``src`` is no such trace, was annotated before, or is ``dst``.
        OSError: a file can't be read or written.
    """
    if Path(dst).exists() and Path(src).samefile(dst):
        raise ValueError(f"src and dst are the same file, {os.fspath(src)}; name another one for the annotated trace")
    replays = _replays(src)
    found = match(replays.values(), graphs)
    lanes = _Lanes()
    num_events = 0
    with opened_text(src) as file, written_whole(dst) as out:
        for piece in pieces(file, os.fspath(src)):
            if isinstance(piece, EndOfEvents):
                num_events = piece.num_events
                for number, event in enumerate(lanes.events()):
                    out.write((",\n" if num_events or number else "") + json.dumps(event))
            elif isinstance(piece, Event) and piece.number in found.nodes:
                graph, path = found.nodes[piece.number]
                labelled = _labelled(piece.value, graphs[graph], path, lanes)
                if piece.number in found.without_stack:
                    labelled["args"].pop("stack", None)
                out.write(json.dumps(labelled))
            else:
                out.write(piece.text)
    return AnnotatedTrace(
        num_events=num_events,
        num_replays=len(replays),
        num_labelled=len(found.nodes),
        num_labelled_by_id=found.num_by_id,
        unlabelled=_reasons(found),
    )


def _reasons(found: Matches) -> dict[str, int]:
    order = list(Reason)
    counts = sorted(found.unlabelled.items(), key=lambda item: order.index(item[0]))
    return {str(reason): number for reason, number in counts if number}


def _replays(src: str | os.PathLike[str]) -> dict[int, list[GpuEvent]]:
    """GPU events of each graph replay, by its correlation id."""
    groups: dict[int, list[GpuEvent]] = defaultdict(list)
    launches: set[int] = set()
    known: dict[Hashable, Hashable] = {}
    with opened_text(src) as file:
        for piece in pieces(file, os.fspath(src)):
            if not isinstance(piece, Event) or not isinstance(piece.value, dict):
                continue
            category, args = piece.value.get("cat"), piece.value.get("args")
            if category == _SCOPE_CATEGORY:
                raise ValueError(f"{os.fspath(src)} is annotated already; start from what torch.profiler exported")
            if not isinstance(args, dict) or not isinstance(args.get("correlation"), int):
                continue
            if category in _GPU_CATEGORIES:
                event = _gpu_event(piece, args, known)
                groups[event.correlation].append(event)
            elif category in _LAUNCH_CATEGORIES and "GraphLaunch" in str(piece.value.get("name")):
                launches.add(args["correlation"])
    return {
        correlation: events
        for correlation, events in groups.items()
        if correlation in launches or len(events) > 1 or events[0].node_id
    }


def _gpu_event(piece: Event, args: Mapping[str, Any], known: dict[Hashable, Hashable]) -> GpuEvent:
    event = piece.value
    category = str(event["cat"])
    name = str(event.get("name"))
    shape: Hashable = args.get("bytes")
    if category == "kernel" and (found := _COPY_KERNEL.fullmatch(name)):
        category = "gpu_" + found[1]
    elif category == "kernel":
        grid, block = args.get("grid"), args.get("block")
        shape = (*grid, *block) if isinstance(grid, list) and isinstance(block, list) else None
    return GpuEvent(
        number=piece.number,
        correlation=args["correlation"],
        category=str(known.setdefault(category, category)),
        name=str(known.setdefault(name, name)),
        start=float(event.get("ts", 0)),
        node_id=int(args.get("graph node id") or 0),
        shape=known.setdefault(shape, shape),
    )


def _labelled(event: dict[str, Any], graph: TraceGraph, path: tuple[int, ...], lanes: _Lanes) -> dict[str, Any]:
    node = graph.nodes[path[0]]
    scopes = scope_names(node.annotation)
    args = {**event["args"], **_labels(node, scopes), "graph": graph.name, "node": ".".join(map(str, path))}
    if len(path) == 1:
        args["node"] = path[0]
    stream = event.get("tid")
    labelled = {**event, "args": args}
    lane = (node.annotation or {}).get("stream")
    if type(lane) is int and lane != stream:
        labelled["tid"] = lane
        args["stream"] = lane
        args["original_stream"] = stream
        lanes.name_stream(event.get("pid"), lane, scopes)
    lanes.add(labelled, " + ".join(scopes))
    return labelled


def _labels(node: TraceNode, scopes: Sequence[str]) -> dict[str, Any]:
    labels: dict[str, Any] = {}
    if node.annotation:
        if scopes:
            labels["scope"] = " + ".join(scopes)
        labels["annotation"] = json.loads(json.dumps(dict(node.annotation), default=repr, skipkeys=True))
    if node.sources:
        labels["source"] = list(node.sources)
    if node.modules:
        labels["module"] = list(node.modules)
    if node.stack:
        labels["stack"] = node.stack.splitlines()
    return labels


class _Lanes:
    """The lanes to add: slices of scopes per stream, and names of ``mark_stream`` lanes."""

    def __init__(self) -> None:
        self._pieces: dict[tuple[Any, Any], list[tuple[float, float, str, Any]]] = defaultdict(list)
        self._names: dict[tuple[Any, int], str] = {}

    def name_stream(self, pid: Any, lane: int, scopes: Sequence[str]) -> None:
        self._names.setdefault((pid, lane), f"stream lane {lane}" + (f" ({scopes[0]})" if scopes else ""))

    def add(self, event: Mapping[str, Any], scope: str) -> None:
        start, length = float(event.get("ts", 0)), float(event.get("dur", 0))
        place = event.get("pid"), event.get("tid")
        self._pieces[place].append((start, start + length, scope, event["args"]["correlation"]))

    def events(self) -> Iterator[dict[str, Any]]:
        """Events to add to the trace."""
        for (pid, lane), name in self._names.items():
            yield _metadata("thread_name", pid, lane, name=name)
            yield _metadata("thread_sort_index", pid, lane, sort_index=lane)
        for (pid, tid), timed in self._pieces.items():
            if not isinstance(tid, int) or not any(scope for _, _, scope, _ in timed):
                continue
            lane = _SCOPE_LANES + tid
            yield _metadata("thread_name", pid, lane, name=f"scopes of stream {tid}")
            yield _metadata("thread_sort_index", pid, lane, sort_index=tid)
            for start, end, scope, _ in _runs(timed):
                yield {
                    "ph": "X",
                    "cat": _SCOPE_CATEGORY,
                    "name": scope,
                    "pid": pid,
                    "tid": lane,
                    "ts": start,
                    "dur": round(end - start, 3),
                }


def _runs(timed: list[tuple[float, float, str, Any]]) -> Iterator[tuple[float, float, str, Any]]:
    """Neighbours of one scope in one replay as one slice; slices don't overlap."""
    last: tuple[float, float, str, Any] | None = None
    for start, end, scope, replay in sorted(timed, key=lambda piece: piece[:2]):
        if last is not None and last[2:] == (scope, replay):
            last = (last[0], max(last[1], end), scope, replay)
            continue
        if last is not None and last[2]:
            yield (last[0], min(last[1], start), *last[2:])
        last = (start, end, scope, replay)
    if last is not None and last[2]:
        yield last


def _metadata(kind: str, pid: Any, tid: int, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "ts": 0, "args": args}
