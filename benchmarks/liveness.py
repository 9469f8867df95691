"""``check_input_liveness``: what it costs per replay."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.measure import alternate, dropping, launching
from benchmarks.rows import Row, ratio_row, value_row
from benchmarks.settings import Settings
from graphcap_backend import graph

NUM_INPUTS = (1, 10, 100)
CALLS = 200


def _work(inputs: list[Tensor]) -> list[Tensor]:
    return [x + 1 for x in inputs]


def _captured(settings: Settings, inputs: list[Tensor], check: bool) -> tuple[Any, list[Tensor]]:
    graph_ = settings.new_graph()
    with graph(graph_, check_input_liveness=check):
        outputs = _work(inputs)
    return graph_, outputs


def _captured_by_torch(settings: Settings, inputs: list[Tensor]) -> tuple[Any, list[Tensor]]:
    graph_ = settings.new_graph()
    with torch.cuda.graph(graph_) if settings.on_cuda else graph(graph_):
        outputs = _work(inputs)
    return graph_, outputs


def liveness(settings: Settings) -> list[Row]:
    """Host time of a replay with the check on and off, by number of inputs."""
    return [row for number in NUM_INPUTS for row in _rows(settings, number)]


def _rows(settings: Settings, number: int) -> list[Row]:
    inputs = [torch.randn(8, device=settings.device) for _ in range(number)]
    _work(inputs)
    captured = {
        "on": _captured(settings, inputs, True),
        "off": _captured(settings, inputs, False),
        "torch": _captured_by_torch(settings, inputs),
    }
    sides = {
        side: partial(launching, dropping(graph_.replay), settings.synchronize, CALLS)
        for side, (graph_, _) in captured.items()
    }
    samples = alternate(sides, rounds=settings.rounds, seconds=settings.seconds)
    added = [on - off for on, off in zip(samples["on"], samples["off"], strict=True)]
    return [
        value_row(
            f"liveness/{number}-inputs",
            f"check_input_liveness: added to the host time of a replay that reads {number} inputs",
            added,
            unit="us",
            sides=samples,
        ),
        ratio_row(
            f"liveness/{number}-inputs-off",
            "the check off: a replay of a graph captured by graph() / by torch.cuda.graph",
            {side: samples[side] for side in ("off", "torch")},
            ours="off",
            theirs="torch",
            unit="us",
        ),
    ]


ROWS = {"liveness": liveness}
