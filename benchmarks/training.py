"""A training step: forward, backward, gradients dropped."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from benchmarks import models
from benchmarks.measure import alternate, dropping, end_to_end, number_for
from benchmarks.rows import Row, Target, ratio_row
from benchmarks.settings import Settings

SIDES = ("reduce-overhead", "compile", "graphcap")
WIDTH, BATCH, NUM_LAYERS = 512, 64, 8


def _step(compiled: Callable[[Tensor], Tensor], parameters: list[nn.Parameter], x: Tensor) -> None:
    compiled(x).sum().backward()  # type: ignore[no-untyped-call]
    for parameter in parameters:
        parameter.grad = None


def _check(compiled: Callable[[Tensor], Tensor], model: nn.Module, eager: nn.Module, x: Tensor, side: str) -> None:
    compiled(x).sum().backward()  # type: ignore[no-untyped-call]
    eager(x).sum().backward()
    for ours, theirs in zip(model.parameters(), eager.parameters(), strict=True):
        if ours.grad is None or theirs.grad is None:
            raise AssertionError(f"{side}: a parameter got no gradient")
        models.assert_close(ours.grad, theirs.grad, side)
        ours.grad = theirs.grad = None


def training(settings: Settings) -> list[Row]:
    """8 x (Linear 512 + GELU), batch 64."""
    eager = models.Mlp(NUM_LAYERS, settings.scaled(WIDTH)).to(settings.device)
    x = torch.randn(BATCH, settings.scaled(WIDTH), device=settings.device)
    sync = settings.synchronize
    sides: dict[str, Callable[[], float]] = {}
    for side in SIDES:
        model: nn.Module = models.fresh(eager)
        compiled = models.compile_side(side, model, settings.device)
        loop = dropping(partial(_step, compiled, list(model.parameters()), x))
        loop(8)
        _check(compiled, model, eager, x, side)
        sides[side] = partial(end_to_end, loop, sync, number_for(loop, sync, seconds=0.04))
    samples = alternate(sides, rounds=settings.rounds, seconds=settings.seconds)
    return [
        ratio_row(
            "training",
            f"training step, {NUM_LAYERS} x (Linear {WIDTH} + GELU), batch {BATCH}, end to end",
            samples,
            ours="graphcap",
            theirs="reduce-overhead",
            unit="us",
            target=Target(bar=0.90, aim=0.80),
        )
    ]


ROWS = {"training": training}
