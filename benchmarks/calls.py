"""Inference calls: host time and end-to-end time, beside reduce-overhead, plain compile and raw replay."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks import models
from benchmarks.measure import alternate, dropping, end_to_end, holding, host_dropping, host_holding, number_for
from benchmarks.rows import Row, Target, ratio_row
from benchmarks.settings import Settings

SIDES = ("reduce-overhead", "compile", "graphcap")
RAW_TARGET = Target(bar=1.02, aim=1.01)
_HELD = {False: ("dropped", "results dropped"), True: ("held", "y = f(x) in a loop")}


class Subject:
    """One model compiled by each side, warm and checked against eager."""

    def __init__(self, target: Callable[..., Any], x: Tensor, settings: Settings, sides: tuple[str, ...]) -> None:
        self.settings = settings
        self.compiled: dict[str, Any] = {}
        self.calls: dict[str, Callable[[], Tensor]] = {}
        expected = target(x)
        for side in sides:
            compiled = models.compile_side(side, models.fresh(target), settings.device)
            self.compiled[side] = compiled
            self.calls[side] = partial(compiled, x)
            dropping(self.calls[side])(8)
            holding(self.calls[side])(8)
            models.assert_close(self.calls[side](), expected, side)
        settings.synchronize()

    def host(self, held: bool) -> dict[str, list[float]]:
        """Host time of a call by side."""
        sample = host_holding if held else host_dropping
        sync = self.settings.synchronize
        sides = {side: partial(sample, call, sync, 30) for side, call in self.calls.items()}
        return alternate(sides, rounds=self.settings.rounds, seconds=self.settings.seconds)

    def end_to_end(self, held: bool) -> dict[str, list[float]]:
        """End-to-end time of a call by side."""
        loops = {side: (holding if held else dropping)(call) for side, call in self.calls.items()}
        return self._loops(loops)

    def beside_raw_replay(self) -> dict[str, list[float]]:
        """End-to-end time of our call and of ``replay()`` on the graph that it replays."""
        from graphcap_backend import report

        graphs = report(self.compiled["graphcap"]).graphs
        if not graphs:
            raise AssertionError(f"nothing was captured:\n{report(self.compiled['graphcap'])}")
        ours = self.calls["graphcap"]
        raw = partial(type(graphs[0]).replay, graphs[0])  # past what follows a user's own call of it
        return self._loops({"graphcap": dropping(ours), "raw replay": dropping(raw)})

    def _loops(self, loops: dict[str, Callable[[int], None]]) -> dict[str, list[float]]:
        sync = self.settings.synchronize
        sides = {
            side: partial(end_to_end, loop, sync, number_for(loop, sync, seconds=0.02)) for side, loop in loops.items()
        }
        return alternate(sides, rounds=self.settings.rounds, seconds=self.settings.seconds)


def _transformer(num_layers: int, width: int, num_heads: int, settings: Settings) -> tuple[models.Transformer, Tensor]:
    if not settings.on_cuda:
        num_layers, width = 2, 16 * num_heads
    model = models.Transformer(num_layers, width, num_heads).to(settings.device).eval()
    return model, torch.randn(1, 16, width, device=settings.device)


def _ratio_rows(
    name: str, what: str, target: Target, measure: Callable[[bool], dict[str, list[float]]]
) -> Iterator[Row]:
    for held, (key, text) in _HELD.items():
        samples = measure(held)
        yield ratio_row(
            f"{name}/{key}",
            f"{what}, {text}",
            samples,
            ours="graphcap",
            theirs="reduce-overhead",
            unit="us",
            target=target,
        )


@torch.no_grad()
def one_kernel(settings: Settings) -> list[Row]:
    """Host time of ``x + 1`` on 8 floats."""
    subject = Subject(models.add_one, torch.randn(8, device=settings.device), settings, SIDES)
    target = Target(bar=0.50, aim=0.35)
    return list(_ratio_rows("one-kernel", "host time of a one-kernel inference call", target, subject.host))


@torch.no_grad()
def mlp4(settings: Settings) -> list[Row]:
    """End-to-end time of 4 x (Linear 256 + GELU), batch 32: host bound."""
    model = models.Mlp(4, 256).to(settings.device).eval()
    subject = Subject(model, torch.randn(32, 256, device=settings.device), settings, SIDES)
    target = Target(bar=0.60, aim=0.45)
    return list(_ratio_rows("mlp4", "end to end, 4-layer MLP", target, subject.end_to_end))


@torch.no_grad()
def transformer4(settings: Settings) -> list[Row]:
    """The 4-layer transformer, width 256, 16 tokens, beside a raw replay."""
    model, x = _transformer(4, 256, 4, settings)
    subject = Subject(model, x, settings, ("graphcap",))
    return [_raw_row("transformer4", "4-layer transformer", subject)]


@torch.no_grad()
def transformer12(settings: Settings) -> list[Row]:
    """The 12-layer transformer, width 768, 16 tokens: host time, and beside a raw replay."""
    model, x = _transformer(12, 768, 12, settings)
    subject = Subject(model, x, settings, SIDES)
    target = Target(bar=0.65, aim=0.50)
    return [
        *_ratio_rows("transformer12", "host time of the 12-layer transformer", target, subject.host),
        _raw_row("transformer12", "12-layer transformer", subject),
    ]


def _raw_row(name: str, model: str, subject: Subject) -> Row:
    return ratio_row(
        f"{name}/raw-replay",
        f"end to end, {model} against replay() of the same capture",
        subject.beside_raw_replay(),
        ours="graphcap",
        theirs="raw replay",
        unit="us",
        target=RAW_TARGET,
    )


ROWS = {"one-kernel": one_kernel, "mlp4": mlp4, "transformer4": transformer4, "transformer12": transformer12}
