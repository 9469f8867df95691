"""What eager launches and replays cost after a capture with recording: nothing of CUPTI may stay.

The topic has a process of its own, and nothing in it records before the first half of the samples is taken.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from benchmarks.measure import Loop, alternate, dropping, end_to_end, launching, summarize
from benchmarks.rows import Row, Target, ratio_row
from benchmarks.settings import Settings
from graphcap_backend import graph, mark_kernels

NUM_NODES = 50
CALLS = 200
_TARGET = Target(bar=1.02, aim=1.00)


def _captured(settings: Settings, x: torch.Tensor, *, records: bool) -> Any:
    graph_ = settings.new_graph()
    with graph(graph_, enable_annotations=records, annotation_config={"record_py_stacks": True} if records else None):
        with mark_kernels("work"):
            for _ in range(NUM_NODES):
                x.add_(1)
    return graph_


def _samples(settings: Settings, loops: dict[str, Loop]) -> dict[str, list[float]]:
    sides: dict[str, Callable[[], float]] = {}
    for name, loop in loops.items():
        sides[f"{name}, host"] = partial(launching, loop, settings.synchronize, CALLS)
        sides[f"{name}, end to end"] = partial(end_to_end, loop, settings.synchronize, CALLS)
    return alternate(sides, rounds=settings.rounds, seconds=settings.seconds)


def left_behind(settings: Settings) -> list[Row]:
    """Eager launches, replays of a graph from before, and replays of one captured with recording."""
    x = torch.randn(64, device=settings.device)
    x.add_(1)
    clean = _captured(settings, x, records=False)
    loops = {"eager launch": dropping(partial(x.add_, 1)), "replay": dropping(clean.replay)}
    _samples(settings, loops)  # clocks settle
    before = _samples(settings, loops)
    recorded = _captured(settings, x, records=True)
    after = _samples(settings, loops)
    rows = []
    for name, values in before.items():
        rows.append(_row(name, "after a capture with recording / before it", {"before": values, "after": after[name]}))
    both = _samples(settings, {"clean": dropping(clean.replay), "recorded": dropping(recorded.replay)})
    for how in ("host", "end to end"):
        sides = {"before": both[f"clean, {how}"], "after": both[f"recorded, {how}"]}
        rows.append(_row(f"recorded graph, {how}", "replay of a recorded graph / of one that was not", sides))
    return rows


def _row(name: str, what: str, sides: dict[str, list[float]]) -> Row:
    least = min(len(values) for values in sides.values())
    sides = {side: values[:least] for side, values in sides.items()}
    half = least // 2
    drift = summarize(sides["before"][half:]).median / summarize(sides["before"][:half]).median
    return ratio_row(
        f"left-behind/{name.replace(',', '').replace(' ', '-')}",
        f"{name}: {what}",
        sides,
        ours="after",
        theirs="before",
        unit="us",
        target=_TARGET,
        note=f"noise: second half of the samples before / first half is {drift:.3f}",
    )


ROWS = {"left-behind": left_behind}
