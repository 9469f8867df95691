"""Chrome traces as torch.profiler writes them, made by hand."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from graphcap_backend import Node
from graphcap_backend.files import written_whole

Event = dict[str, Any]


def launch(correlation: int, ts: float, name: str = "cudaGraphLaunch") -> Event:
    return {
        "ph": "X",
        "cat": "cuda_runtime",
        "name": name,
        "pid": 4242,
        "tid": 4242,
        "ts": ts,
        "dur": 5.25,
        "args": {"cbid": 311, "correlation": correlation},
    }


def gpu_event(node: Node, correlation: int, ts: float, *, stream: int = 7, dur: float = 1.5, **args: Any) -> Event:
    """What Kineto writes for ``node`` when it ran."""
    if node.memcpy is not None:
        category, name, shape = "gpu_memcpy", "Memcpy DtoD (Device -> Device)", {"bytes": node.memcpy.num_bytes}
    elif node.memset is not None:
        category, name, shape = "gpu_memset", "Memset (Device)", {"bytes": node.memset.num_bytes}
    else:
        name = torch._C._demangle(node.name) if node.name.startswith("_Z") else node.name
        category, shape = "kernel", {"grid": list(node.grid or ()), "block": list(node.block or ())}
    return {
        "ph": "X",
        "cat": category,
        "name": name,
        "pid": 0,
        "tid": stream,
        "ts": ts,
        "dur": dur,
        "args": {"device": 0, "context": 1, "stream": stream, "correlation": correlation, **shape, **args},
    }


def replay(
    nodes: Iterable[Node], correlation: int, ts: float, *, exec_id: int | None = None, stream: int = 7
) -> list[Event]:
    """One replay on one stream, nodes in the order given."""
    events = [launch(correlation, ts)]
    for position, node in enumerate(nodes):
        ids = {} if exec_id is None else {"graph id": exec_id, "graph node id": exec_id << 32 | node.index}
        events.append(gpu_event(node, correlation, ts + 10 + 2 * position, stream=stream, **ids))
    return events


def write_trace(path: Path, events: Iterable[Event]) -> Path:
    """As Kineto lays it out: head, an event per line, a tail of other keys."""
    head = {"schemaVersion": 1, "deviceProperties": [{"id": 0, "name": "NVIDIA H200"}], "displayTimeUnit": "ms"}
    with written_whole(path) as file:
        file.write(json.dumps(head, indent=2)[:-2] + ',\n  "traceEvents": [\n')
        for number, event in enumerate(events):
            file.write((",\n  " if number else "  ") + json.dumps(event))
        file.write('\n  ],\n  "traceName": "trace.json",\n  "baseTimeNanoseconds": 1764547200000000000\n}\n')
    return path


CPU_EVENTS: list[Event] = [
    {"ph": "M", "name": "process_name", "ts": 0, "pid": 0, "tid": 0, "args": {"name": "python"}},
    {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 42, "tid": 1, "ts": 1.001, "dur": 2, "args": {"Ev Idx": 1}},
    {"ph": "s", "cat": "ac2g", "id": 77, "name": "ac2g", "pid": 4242, "tid": 4242, "ts": 3},
    {"ph": "X", "cat": "user_annotation", "name": 'odd "name" \\ \u00fc {[', "pid": 1, "tid": 1, "ts": 5, "dur": 1e-3},
]  # fmt: skip
