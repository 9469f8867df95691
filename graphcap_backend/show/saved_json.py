"""The format of a saved capture: JSON, one version.

::

    {"format": "graphcap capture", "version": 1, "versions": {...}, "parts": [...],
     "stacks": ["file:line:function\\n...", ...],
     "graphs": [{"name": ..., "nodes": [{"kind": "kernel", "stack": 0, ...}, ...]}, ...],
     "source_text": {file: {line: text}}, "profile": {...} or null}

Fields of a node that are as by default are left out; ``index`` is the position in its list.
"""

from __future__ import annotations

import dataclasses
import json
import os
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, Final, TextIO

from graphcap_backend.annotate.profile import Timing
from graphcap_backend.capture.nodes import Conditional, Memcpy, Memset, Node, NodeKind, NodeList
from graphcap_backend.capture.skip import SkipKind, SkipReason
from graphcap_backend.errors import SavedCaptureError
from graphcap_backend.files import opened_text
from graphcap_backend.show.profile import NodeTime, OutsideTime, Profile
from graphcap_backend.show.saved import SavedCapture, SavedGraph, SavedPart

FORMAT: Final = "graphcap capture"
VERSION: Final = 1

_LISTS: Final = (
    "grid",
    "block",
    "cluster",
    "dependencies",
    "programmatic_dependencies",
    "mem_ops",
    "sources",
    "modules",
)
_RECORDS: Final = {"memcpy": Memcpy, "memset": Memset, "conditional": Conditional}
_DEFAULTS: Final = {
    field.name: field.default for field in dataclasses.fields(Node) if field.default is not dataclasses.MISSING
}


def to_json(capture: SavedCapture, file: TextIO) -> None:
    """Write ``capture`` to ``file``."""
    stacks: dict[str, int] = {}
    whole = {
        "format": FORMAT,
        "version": VERSION,
        "versions": dict(capture.versions),
        "parts": [dataclasses.asdict(part) for part in capture.parts],
        "graphs": [
            {
                "name": graph.name,
                "way": graph.way,
                "source_graph_id": graph.source_graph_id,
                "exec_graph_id": graph.exec_graph_id,
                "nodes": _nodes_out(graph.nodes, stacks),
            }
            for graph in capture.graphs
        ],
        "stacks": list(stacks),
        "source_text": capture.source_text,
        "profile": _profile_out(capture.profile),
    }
    # By chunks: dumps would hold the text of tens of thousands of nodes twice.
    for chunk in json.JSONEncoder(default=repr, separators=(",", ":")).iterencode(_plain_keys(whole)):
        file.write(chunk)
    file.write("\n")


def _plain_keys(value: Any) -> Any:
    """``value`` with text for keys that JSON does not take: an annotation may be any dict."""
    if isinstance(value, Mapping):
        return {key if isinstance(key, (str, int)) else repr(key): _plain_keys(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain_keys(item) for item in value]
    return value


def _nodes_out(nodes: NodeList, stacks: dict[str, int]) -> list[dict[str, Any]]:
    written = []
    for node in nodes:
        row: dict[str, Any] = {"kind": str(node.kind), "name": node.name}
        for name, default in _DEFAULTS.items():
            value = getattr(node, name)
            if value == default:
                continue
            if name == "stack":
                value = stacks.setdefault(value, len(stacks))
            elif name == "body":
                value = _nodes_out(value, stacks)
            elif name in _RECORDS:
                value = dataclasses.asdict(value)
            row[name] = value
        written.append(row)
    return written


def _profile_out(profile: Profile | None) -> dict[str, Any] | None:
    if profile is None:
        return None
    return {
        "clock": profile.clock,
        "num_calls": profile.num_calls,
        "times": [[time.graph, time.path, *_timing_out(time.timing)] for time in profile.times],
        "outside": [[time.name, *_timing_out(time.timing)] for time in profile.outside],
    }


def _timing_out(timing: Timing) -> tuple[int, int, int, int]:
    return timing.count, timing.total_ns, timing.min_ns, timing.max_ns


def from_json(path: str | os.PathLike[str]) -> SavedCapture:
    """What ``to_json`` wrote to the file ``path``. Raises: as ``load_capture``."""
    name = os.fspath(path)
    try:
        with opened_text(path) as file:
            whole = json.load(file)
    except (ValueError, EOFError, zlib.error) as error:  # ValueError: JSON, and text that isn't UTF-8
        raise SavedCaptureError(f"{name} is cut off or no saved capture ({error}); save it anew") from error
    except OSError as error:
        if error.errno is not None:
            raise
        raise SavedCaptureError(f"{name} is no saved capture: its name says gzip and it is not ({error})") from error
    if not isinstance(whole, dict) or whole.get("format") != FORMAT:
        raise SavedCaptureError(f"{name} is no saved capture: expected a file that save_capture() wrote")
    if whole.get("version") != VERSION:
        writer = _mapping(whole.get("versions")).get("graphcap", "of then")
        raise SavedCaptureError(
            f"{name} has version {whole.get('version')!r} of the format, and this graphcap reads version {VERSION}. "
            f"Save it anew, or read it with graphcap {writer}"
        )
    try:
        return _capture_in(whole)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise SavedCaptureError(f"{name} is damaged ({type(error).__name__}: {error}); save it anew") from error


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _capture_in(whole: Mapping[str, Any]) -> SavedCapture:
    stacks = [str(stack) for stack in whole["stacks"]]
    capture = SavedCapture(
        versions={str(key): str(value) for key, value in whole["versions"].items()},
        graphs=tuple(
            SavedGraph(**{**graph, "nodes": NodeList(_nodes_in(graph["nodes"], stacks))}) for graph in whole["graphs"]
        ),
        parts=tuple(_part_in(part) for part in whole["parts"]),
        source_text={
            file: {int(line): str(text) for line, text in lines.items()} for file, lines in whole["source_text"].items()
        },
    )
    if whole["profile"] is None:
        return capture
    return dataclasses.replace(capture, profile=_profile_in(whole["profile"], capture))


def _nodes_in(rows: Sequence[Mapping[str, Any]], stacks: Sequence[str]) -> list[Node]:
    nodes = []
    for index, row in enumerate(rows):
        fields = dict(row)
        fields["kind"] = NodeKind(fields["kind"])
        for name in _LISTS:
            if name in fields:
                fields[name] = tuple(fields[name])
        for name, record in _RECORDS.items():
            if name in fields:
                fields[name] = record(**fields[name])
        if "conditional" in fields:
            conditional = fields["conditional"]
            fields["conditional"] = dataclasses.replace(conditional, body_sizes=tuple(conditional.body_sizes))
        if "stack" in fields:
            fields["stack"] = stacks[fields["stack"]]
        if "body" in fields:
            fields["body"] = NodeList(_nodes_in(fields["body"], stacks))
        nodes.append(Node(**{"index": index, **fields}))
    return nodes


def _part_in(row: Mapping[str, Any]) -> SavedPart:
    reasons = tuple(SkipReason(**{**reason, "kind": SkipKind(reason["kind"])}) for reason in row["reasons"])
    return SavedPart(**{**row, "reasons": reasons, "graphs": tuple(row["graphs"])})


def _profile_in(row: Mapping[str, Any], capture: SavedCapture) -> Profile:
    times = []
    for graph, path, *numbers in row["times"]:
        labels = node = capture.graphs[graph].nodes[path[0]]
        for index in path[1:]:
            if node.body is None:
                raise ValueError(f"node {path} of graph {graph} is in no body")
            node = node.body[index]
        times.append(NodeTime(graph=graph, path=tuple(path), node=node, labels=labels, timing=_timing_in(numbers)))
    outside = (OutsideTime(name=name, timing=_timing_in(numbers)) for name, *numbers in row["outside"])
    return Profile(
        capture=capture,
        clock=str(row["clock"]),
        num_calls=int(row["num_calls"]),
        times=tuple(times),
        outside=tuple(outside),
    )


def _timing_in(numbers: Sequence[int]) -> Timing:
    count, total, low, high = map(int, numbers)
    return Timing(count=count, total_ns=total, min_ns=low, max_ns=high)
