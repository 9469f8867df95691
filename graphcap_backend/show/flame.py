"""Flame graphs of a capture: speedscope's JSON, and collapsed stacks for flamegraph.pl and the like."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator
from fractions import Fraction
from typing import Any, Literal

from graphcap_backend.capture.kernel_names import display_name
from graphcap_backend.capture.nodes import Node
from graphcap_backend.files import written_whole
from graphcap_backend.show.saved import SavedCapture, snapshot, split_frame

Format = Literal["speedscope", "collapsed"]
Weight = Literal["time", "nodes"]
Frames = tuple[str, ...]
"""Outermost first: the stack's "file:line:function" lines, then the kernel."""

_SCHEMA = "https://www.speedscope.app/file-format-schema.json"


def write_flame_graph(
    path: str | os.PathLike[str],
    source: Any,
    *,
    weight: Weight | None = None,
    format: Format | None = None,  # noqa: A002 - what everybody calls it
) -> None:
    """Write a flame graph of captured nodes: call path of the model, source line, kernel.

    A kernel fused from several lines is shown below each of them with an equal part of its weight.

    Args:
        path: the file; there in whole or not at all, compressed if the name ends in ".gz".
        source: a profile, a saved capture, a compiled function or a captured graph.
        weight: "time" (nanoseconds, needs a profile) or "nodes". By default time where it was measured.
        format: "speedscope" or "collapsed" (one line per stack). By default collapsed for names that end in
            ".txt" or ".folded".

    Raises:
        ValueError: an argument is not what it must be, or there is no time to weigh by.
        OSError: the file can't be written.
    """
    if weight not in (None, "time", "nodes"):
        raise ValueError(f"weight must be 'time' or 'nodes', found {weight!r}")
    if format not in (None, "speedscope", "collapsed"):
        raise ValueError(f"format must be 'speedscope' or 'collapsed', found {format!r}")
    capture = snapshot(source, "write_flame_graph(path, source)")
    if weight is None:
        weight = "time" if capture.profile is not None else "nodes"
    plain = os.fspath(path).removesuffix(".gz")
    collapsed = format == "collapsed" or (format is None and plain.endswith((".txt", ".folded")))
    weights = stack_weights(capture, weight)
    with written_whole(path) as file:
        if collapsed:
            file.writelines(collapsed_lines(weights))
        else:
            name = os.path.basename(plain).removesuffix(".json")  # noqa: PTH119 - text, not a file
            json.dump(speedscope(weights, weight, name), file)


def stack_weights(capture: SavedCapture, weight: Weight) -> dict[Frames, Fraction]:
    """Weight of each stack; they sum up exactly to the time of all nodes, or to their number.

    Raises:
        ValueError: ``weight`` is "time" and the capture has no profile.
    """
    found: dict[Frames, Fraction] = defaultdict(Fraction)
    for node, labels, amount in _weighed(capture, weight):
        stacks = list(_stacks(node, labels))
        for stack in stacks:
            found[stack] += Fraction(amount, len(stacks))
    return dict(found)


def _weighed(capture: SavedCapture, weight: Weight) -> Iterator[tuple[Node, Node, int]]:
    if weight == "nodes":
        yield from ((node, node, 1) for graph in capture.graphs for node in graph.nodes)
        return
    if capture.profile is None:
        raise ValueError("this capture has no times to weigh by: save what profile_replays() gave, or weigh by 'nodes'")
    yield from ((time.node, time.labels, time.timing.total_ns) for time in capture.profile.times)


def _stacks(node: Node, labels: Node) -> Iterator[Frames]:
    """One stack per source line. What is left of the recorded stack leads there, outermost first."""
    sources = labels.sources or ((labels.stack or "").splitlines()[:1])
    outer = [line for line in (labels.stack or "").splitlines() if line not in sources]
    kernel = display_name(node.name)
    shared = f" (one of {len(sources)} lines)" if len(sources) > 1 else ""
    for source in sources:
        yield (*reversed(outer), source, kernel + shared)
    if not sources:
        yield ("(no source line)", kernel)


def collapsed_lines(weights: dict[Frames, Fraction]) -> Iterator[str]:
    """``a;b;c weight`` per stack, by name."""
    for stack, weight in sorted(weights.items()):
        frames = ";".join(_shown(frame).replace(";", ":").replace("\n", " ") for frame in stack)
        yield f"{frames} {_number(weight)}\n"


def _in_order_of_nodes(stacks: Iterable[Frames]) -> list[Frames]:
    """Stacks with the same callers beside each other, and callers in the order in which they first launch something."""
    first: dict[Frames, int] = {}
    for stack in stacks:
        for depth in range(1, len(stack) + 1):
            first.setdefault(stack[:depth], len(first))
    return sorted(stacks, key=lambda stack: [first[stack[:depth]] for depth in range(1, len(stack) + 1)])


def speedscope(weights: dict[Frames, Fraction], weight: Weight, name: str) -> dict[str, Any]:
    """The file as speedscope's schema has it: one sampled profile, a sample per stack."""
    frames: dict[str, int] = {}
    stacks = _in_order_of_nodes(weights)
    samples = [[frames.setdefault(frame, len(frames)) for frame in stack] for stack in stacks]
    return {
        "$schema": _SCHEMA,
        "exporter": "graphcap",
        "name": name,
        "activeProfileIndex": 0,
        "shared": {"frames": [_frame(frame) for frame in frames]},
        "profiles": [
            {
                "type": "sampled",
                "name": name,
                "unit": "nanoseconds" if weight == "time" else "none",
                "startValue": 0,
                "endValue": _number(sum(weights.values(), Fraction())),
                "samples": samples,
                "weights": [_number(weights[stack]) for stack in stacks],
            }
        ],
    }


def _frame(frame: str) -> dict[str, Any]:
    place = split_frame(frame)
    if place is None:
        return {"name": frame}
    return {"name": _shown(frame), "file": place[0], "line": place[1]}


def _shown(frame: str) -> str:
    place = split_frame(frame)
    if place is None:
        return frame
    file, line, function = place
    return f"{function} ({file.replace(os.sep, '/').rsplit('/', 1)[-1]}:{line})"


def _number(value: Fraction) -> int | float:
    return int(value) if value.denominator == 1 else round(float(value), 6)
