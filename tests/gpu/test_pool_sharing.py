"""Graphs of one pool use each other's memory: no order of calls and of kept results may show it.

All values are small whole numbers in float32, so results are equal bit by bit whatever kernel makes them.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator

import pytest
import torch
from helpers.shared_memory import shared_from
from torch import Tensor

from graphcap_backend import report

ROWS = (512, 1024, 2048)


@pytest.fixture(autouse=True)
def _needs_cuda() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    torch._dynamo.reset()


def _whole_numbers(*size: int) -> Tensor:
    return torch.randint(-8, 9, size, device="cuda").float()


def _functions() -> list[Callable[[Tensor], Tensor]]:
    weight = _whole_numbers(512, 512).sign()

    def first(x: Tensor) -> Tensor:
        return (torch.relu(x @ weight).clamp(max=60) @ weight).clamp(-60, 60)

    def second(x: Tensor) -> Tensor:
        return (x * 2 + x.flip(0)).cumsum(1).clamp(-60, 60)

    def third(x: Tensor) -> Tensor:
        return (x.roll(1, 0) @ weight + x).clamp(-60, 60)

    return [first, second, third]


def _fallbacks(functions: list[Callable[[Tensor], Tensor]]) -> dict[str, int]:
    total: dict[str, int] = {}
    for function in functions:
        for part in report(function).parts:
            for kind, number in part.fallbacks.items():
                total[kind] = total.get(kind, 0) + number
    return total


@pytest.fixture(params=["plain", "shared", "packed"])
def _sharing(request: pytest.FixtureRequest) -> Iterator[None]:
    """Graphs as they come; or as those that need much memory; and so that each larger one moves all others."""
    with {
        "plain": contextlib.nullcontext(),
        "shared": shared_from(num_bytes=1),
        "packed": shared_from(num_bytes=1, packed_from=1),
    }[request.param]:
        yield


@pytest.mark.usefixtures("_sharing")
@pytest.mark.parametrize("seed", range(3))
def test_any_order_of_calls_and_kept_results(seed: int) -> None:
    rng = random.Random(seed)
    eager = _functions()
    compiled = [torch.compile(f, backend="graphcap", dynamic=False) for f in eager]
    kept: list[tuple[Tensor, Tensor]] = []
    with torch.no_grad():
        for call in range(200):
            x = _whole_numbers(rng.choice(ROWS), 512)
            if kept and rng.random() < 0.5:
                x = rng.choice(kept)[0]  # an output of a graph is the input of another
            which = rng.randrange(3)
            got, want = compiled[which](x), eager[which](x)
            assert torch.equal(got, want), (call, which)
            if rng.random() < 0.6:
                kept.append((got, want))
            while len(kept) > rng.randrange(1, 5):
                kept.pop(rng.randrange(len(kept)))
            for result, expected in kept:
                assert torch.equal(result, expected), (call, which)
    assert set(_fallbacks(compiled)) == {"warm_up"}


@pytest.mark.usefixtures("_sharing")
def test_a_chain_settles_to_replays_only() -> None:
    eager = _functions()
    compiled = [torch.compile(f, backend="graphcap", dynamic=False) for f in eager]

    def chain(functions: list[Callable[[Tensor], Tensor]], x: Tensor) -> Tensor:
        for function in functions:
            x = function(x)
        return x

    with torch.no_grad():
        for _ in range(8):
            for rows in ROWS:
                x = _whole_numbers(rows, 512)
                y = chain(compiled, x)
                assert torch.equal(y, chain(eager, x))
    assert _fallbacks(compiled) == {"warm_up": 9}


def test_sizes_share_memory() -> None:
    torch.cuda.empty_cache()
    layers = [layer for _ in range(4) for layer in (torch.nn.Linear(1024, 1024), torch.nn.ReLU())]
    model = torch.nn.Sequential(*layers).cuda()
    compiled = torch.compile(model, backend="graphcap", dynamic=False)
    sizes = (1024, 2048, 4096, 8192)
    with torch.no_grad():
        for rows in sizes:  # compile and warm up, which need memory of their own
            compiled(torch.randn(rows, 1024, device="cuda"))
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved()
        for rows in sizes:
            for _ in range(4):
                x = torch.randn(rows, 1024, device="cuda")
                y = compiled(x)
            torch.testing.assert_close(y, model(x), rtol=1e-3, atol=1e-3)
    del x, y
    torch.cuda.empty_cache()
    one_result = sizes[-1] * 1024 * 4
    # The largest one's activations in turns, its held result and cuBLAS's workspace; all sizes live in there.
    assert torch.cuda.memory_reserved() - before <= 4.5 * one_result


@pytest.mark.usefixtures("_sharing")
def test_output_held_beyond_the_release_of_its_graph() -> None:
    first, _, third = _functions()
    earlier = torch.compile(first, backend="graphcap", dynamic=False)
    later = torch.compile(third, backend="graphcap", dynamic=False, options={"max_graphs": 1})
    with torch.no_grad():
        x = _whole_numbers(128, 512)
        for _ in range(3):
            earlier(x)
        for _ in range(2):
            later(x)
        held, expected = later(x), third(x)  # where the earlier graph keeps an intermediate
        for _ in range(2):
            later(_whole_numbers(64, 512))  # releases the graph of 128 rows
        for _ in range(4):
            x = _whole_numbers(128, 512)
            assert torch.equal(earlier(x), first(x))
            assert torch.equal(held, expected)


@pytest.mark.usefixtures("_sharing")
def test_workspaces_that_others_clear() -> None:
    first, second, _ = _functions()
    multiplies = torch.compile(first, backend="graphcap", dynamic=False)
    adds = torch.compile(second, backend="graphcap", dynamic=False)
    with torch.no_grad():
        x = _whole_numbers(128, 512)
        for _ in range(3):
            multiplies(x)
        torch._C._cuda_clearCublasWorkspaces()
        kept = []
        for rows in (64, 96, 160, 192):
            y = _whole_numbers(rows, 512)
            for _ in range(2):
                adds(y)
            kept.append((adds(y), second(y)))
        for _ in range(3):
            assert torch.equal(multiplies(x), first(x))
            assert all(torch.equal(got, expected) for got, expected in kept)
