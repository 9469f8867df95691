"""Graphs of one pool use each other's memory: no order of calls and of kept results may show it."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from graphcap_backend import report

ROWS = (512, 1024, 2048)


@pytest.fixture(autouse=True)
def _needs_cuda() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


def _functions() -> list[Callable[[Tensor], Tensor]]:
    def first(x: Tensor) -> Tensor:
        return torch.sin(x @ x.t()) @ x

    def second(x: Tensor) -> Tensor:
        return (x * 2 + 1).cumsum(0) / x.shape[0]

    def third(x: Tensor) -> Tensor:
        return torch.softmax(x, -1) + x.roll(1, 0)

    return [first, second, third]


@pytest.mark.parametrize("seed", range(3))
def test_any_order_of_calls_and_kept_results(seed: int) -> None:
    torch._dynamo.reset()
    rng = random.Random(seed)
    eager = _functions()
    compiled = [torch.compile(f, backend="graphcap", dynamic=False) for f in eager]
    kept: list[tuple[Tensor, Tensor]] = []
    with torch.no_grad():
        for _ in range(150):
            x = torch.randn(rng.choice(ROWS), 512, device="cuda")
            if kept and rng.random() < 0.5:
                x = rng.choice(kept)[0]  # an output of a graph is the input of another
            which = rng.randrange(3)
            got, want = compiled[which](x), eager[which](x)
            torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)
            if rng.random() < 0.6:
                kept.append((got, want))
            while len(kept) > rng.randrange(1, 5):
                kept.pop(rng.randrange(len(kept)))
            for result, expected in kept:
                torch.testing.assert_close(result, expected, rtol=1e-3, atol=1e-3)
    assert all(part.num_replays > 0 for f in compiled for part in report(f).parts)


def test_a_chain_settles_to_replays_only() -> None:
    """A lent output that a later graph's memory overlaps costs a recapture once, not a fallback for good."""
    torch._dynamo.reset()
    first, second, third = [torch.compile(f, backend="graphcap", dynamic=False) for f in _functions()]

    def fallbacks() -> int:
        return sum(
            number
            for f in (first, second, third)
            for part in report(f).parts
            for kind, number in part.fallbacks.items()
            if kind != "warm_up"
        )

    with torch.no_grad():
        for rows in ROWS:
            for _ in range(4):
                third(second(first(torch.randn(rows, 512, device="cuda"))))
        settled = None
        for _ in range(12):
            for rows in ROWS:
                x = torch.randn(rows, 512, device="cuda")
                y = third(second(first(x)))
                eager = _functions()
                torch.testing.assert_close(y, eager[2](eager[1](eager[0](x))), rtol=1e-3, atol=1e-3)
            before, settled = settled, fallbacks()
    assert settled == before, "the last round still had calls that ran uncaptured"


def test_sizes_share_memory() -> None:
    torch._dynamo.reset()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()

    def f(x: Tensor) -> Tensor:
        return torch.relu(x * 2).cumsum(0)

    compiled = torch.compile(f, backend="graphcap", dynamic=True)
    with torch.no_grad():
        for rows in (1024, 2048, 4096, 8192):
            for _ in range(4):
                x = torch.randn(rows, 1024, device="cuda")
                y = compiled(x)
            torch.testing.assert_close(y, f(x))
    (part,) = report(compiled).parts
    assert part.num_keys == 4
    del x, y
    torch.cuda.empty_cache()
    one_result = 8192 * 1024 * 4
    # Input buffer, intermediate and two results of the largest; all smaller sizes live in there as well.
    assert torch.cuda.memory_reserved() - before <= 5 * one_result
