"""Graphs that share even the memory of their outputs: what callers hold survives everything that may become of it."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from helpers.shared_memory import shared_from
from torch import Tensor, nn

from graphcap_backend import precapture, report
from graphcap_backend.capture.allocator import segments_of

MIB = 1 << 20
WIDTH = 1024
SIZES = (512, 1024, 2048, 4096)


@pytest.fixture(autouse=True)
def _sharing() -> Iterator[None]:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    torch._dynamo.reset()
    gc.collect()  # graphs of other tests would be in the pool
    with shared_from(num_bytes=1):
        yield


def _whole_numbers(rows: int) -> Tensor:
    """Small ones in float32: results are equal bit by bit whatever kernel makes them."""
    return torch.randint(-8, 9, (rows, WIDTH), device="cuda").float()


def _layers() -> Callable[[Tensor], Tensor]:
    weight = torch.randint(-1, 2, (WIDTH, WIDTH), device="cuda").float()

    def layers(x: Tensor) -> Tensor:
        for _ in range(4):
            x = (x @ weight).clamp(-6, 6)
        return x

    return layers


def _pool_bytes(compiled: Any) -> int:
    pools = [graph.pool() for graph in report(compiled).graphs]
    return sum(segment["total_size"] for segment in segments_of(torch.cuda.memory_snapshot(), *pools))


def _compiled(function: Callable[[Tensor], Tensor], **options: Any) -> Any:
    return torch.compile(function, backend="graphcap", dynamic=False, options=options)


def _fallbacks(compiled: Any) -> dict[str, int]:
    (part,) = report(compiled).parts
    return part.fallbacks


def test_a_loop_settles_in_the_memory_of_one_call_and_one_result() -> None:
    layers, rows = _layers(), 8192
    compiled = _compiled(layers)
    one = rows * WIDTH * 4
    with torch.no_grad():
        y = None
        for _ in range(12):
            x = _whole_numbers(rows)
            y = compiled(x)
            assert torch.equal(y, layers(x))
        graphs = report(compiled).graphs
        assert 2 <= len(graphs) <= 4
        for _ in range(12):
            x = _whole_numbers(rows)
            y = compiled(x)
            assert torch.equal(y, layers(x))
        assert report(compiled).graphs == graphs
    assert _fallbacks(compiled) == {"warm_up": 1}
    # Two activations in turns, a held result, cuBLAS's workspace of 32 MiB, the copied weight in 20 MiB.
    assert _pool_bytes(compiled) <= 3 * one + 56 * MIB


def test_small_shapes_find_room_where_large_ones_have_theirs() -> None:
    layers = _layers()
    compiled, alone = _compiled(layers), _compiled(layers)
    with torch.no_grad():
        for _ in range(3):
            for rows in SIZES:
                for _ in range(4):
                    x = _whole_numbers(rows)
                    y = compiled(x)
                    assert torch.equal(y, layers(x))
        assert [part.num_keys for part in report(compiled).parts] == [1] * len(SIZES)
        of_all = _pool_bytes(compiled)
        del y, compiled
        torch._dynamo.reset()
        gc.collect()
        for _ in range(8):
            y = alone(_whole_numbers(SIZES[-1]))
        assert y.shape == (SIZES[-1], WIDTH)
    assert of_all <= _pool_bytes(alone) + 4 * MIB


def test_sizes_in_any_order_are_replayed() -> None:
    """What is held when a graph is captured was given back long ago."""
    layers, rng = _layers(), random.Random(3)
    compiled = _compiled(layers)
    held: list[tuple[Tensor, Tensor]] = []
    with torch.no_grad():
        for _ in range(150):
            x = _whole_numbers(rng.choice(SIZES))
            held.append((compiled(x), layers(x)))
            while len(held) > rng.choice([1, 1, 2, 3]):
                held.pop(0)
            for got, expected in held:
                assert torch.equal(got, expected)
        fallbacks = [dict(part.fallbacks) for part in report(compiled).parts]
    assert fallbacks == [{"warm_up": 1}] * len(SIZES)


@pytest.mark.parametrize("how", ["deleted", "reset by the user", "dynamo reset", "dropped for a larger one"])
def test_a_held_result_outlives_its_graph(how: str) -> None:
    layers = _layers()
    compiled, other = _compiled(layers), _compiled(lambda x: layers(x) + 1)
    with torch.no_grad():
        for _ in range(3):
            other(_whole_numbers(256))
        x = _whole_numbers(1024)
        for _ in range(2):
            compiled(x)
        for _ in range(3):  # gives the memory of the results back
            other(_whole_numbers(512))
        y, expected = compiled(x)[5:], layers(x)[5:]
        if how == "deleted":
            del compiled
            gc.collect()
        elif how == "reset by the user":
            for graph in report(compiled).graphs:
                graph.reset()
        elif how == "dynamo reset":
            torch._dynamo.reset()
            gc.collect()
        torch.cuda.empty_cache()
        for rows in (1024, 8192, 16384) if how == "dropped for a larger one" else (1024, 512):
            for _ in range(4):
                x = _whole_numbers(rows)
                assert torch.equal(other(x), layers(x) + 1)
                filler = [torch.full((1024, WIDTH), 77.0, device="cuda") for _ in range(8)]
                del filler
        assert torch.equal(y, expected)


def test_memory_comes_back_when_the_result_goes() -> None:
    layers = _layers()

    def run() -> Tensor:
        compiled = _compiled(lambda x: layers(x) + 1)
        with torch.no_grad():
            for rows in (4096, 4096, 4096, 512, 512, 4096):
                y = compiled(_whole_numbers(rows))
        return y

    def reserved() -> int:
        torch._dynamo.reset()
        gc.collect()
        graph = torch.cuda.CUDAGraph()  # a capture of ours lets go of what nobody holds any more
        from graphcap_backend import graph as capture

        with capture(graph):
            scratch = torch.zeros(1, device="cuda")
        del graph, scratch
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved()

    run()
    before = reserved()
    y = run()
    expected = y.clone()
    assert reserved() > before
    assert torch.equal(y, expected)
    del y, expected
    assert reserved() <= before + 4 * MIB


def test_somebody_else_records_the_allocators_history() -> None:
    layers = _layers()
    compiled = _compiled(layers)
    torch.cuda.memory._record_memory_history("state", context=None)
    try:
        with torch.no_grad():
            held = []
            for _ in range(8):
                x = _whole_numbers(512)
                held = [*held[-1:], (compiled(x), layers(x))]
                assert all(torch.equal(got, expected) for got, expected in held)
        assert _fallbacks(compiled) == {"warm_up": 1}
    finally:
        torch.cuda.memory._record_memory_history(None)


def test_precapture_leaves_nothing_to_capture() -> None:
    layers = _layers()
    compiled = _compiled(layers)
    inputs = [_whole_numbers(rows) for rows in (512, 4096, 1024, 8192)]
    with torch.no_grad(), shared_from(num_bytes=1, packed_from=1):
        rows = precapture(compiled, inputs, progress=False)
        graphs = report(compiled).graphs
        assert sum(row.num_graphs for row in rows) == len(graphs)
        assert all(row.num_graphs >= 2 for row in rows)
        for x in inputs:
            assert torch.equal(compiled(x), layers(x))
    assert set(map(id, report(compiled).graphs)) == set(map(id, graphs))


@pytest.mark.parametrize("share", [False, True])
def test_a_result_that_its_caller_resizes(share: bool) -> None:
    compiled = _compiled(lambda x: x * 2 + 1)
    with torch.no_grad(), shared_from(num_bytes=1 if share else 1 << 40):
        for number in range(12):
            x = torch.full((64, 64), float(number), device="cuda")
            y = compiled(x)
            assert torch.equal(y, x * 2 + 1), number
            if number % 3 == 2:
                if share:
                    with pytest.raises(RuntimeError, match="not resizable"):
                        y.resize_(128, 128)
                elif number % 2:
                    y.untyped_storage().resize_(0)
                else:
                    y.resize_(128, 128).fill_(7)


@pytest.mark.filterwarnings("ignore:Torchinductor does not support code generation for complex:UserWarning")
def test_results_of_several_kinds() -> None:
    """Views of one result, an input, a constant, nothing at all in one tensor, bits of another type."""
    constant = torch.arange(8.0, device="cuda")

    class Several(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("constant", constant)

        def forward(self, x: Tensor) -> Any:
            y = (x * 2).cumsum(0)
            return y, y[1:], y.t(), x, self.constant, x[:0] * 2, (x > 0), y.to(torch.complex64).conj()

    model = Several()
    compiled: Any = torch.compile(model, backend="graphcap", dynamic=False)
    held: list[Any] = []
    with torch.no_grad():
        for _ in range(10):
            x = _whole_numbers(64)
            got, expected = compiled(x), model(x)
            assert got[3] is x
            assert got[1].untyped_storage().data_ptr() == got[0].untyped_storage().data_ptr()
            held = [*held[-1:], (got, expected)]
            for results, wanted in held:
                for result, want in zip(results, wanted, strict=True):
                    assert torch.equal(result, want)
                    assert result.stride() == want.stride()
    assert _fallbacks(compiled) == {"warm_up": 1}
    assert report(compiled).parts[0].state == "captured"


@pytest.mark.filterwarnings("ignore:(?s).*eterministic:UserWarning")
def test_deterministic_mode_fills_nothing_that_is_held() -> None:
    """There a new tensor is filled, and what a capture keeps off held memory with must not be."""
    layers, rng = _layers(), random.Random(5)
    compiled = _compiled(layers)
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        held: list[tuple[Tensor, Tensor]] = []
        with torch.no_grad():
            for _ in range(60):
                x = _whole_numbers(rng.choice(SIZES))
                held.append((compiled(x), layers(x)))
                while len(held) > rng.choice([1, 2, 3]):
                    held.pop(0)
                for got, expected in held:
                    assert torch.equal(got, expected)
    finally:
        torch.use_deterministic_algorithms(False)
    assert sum(part.num_replays for part in report(compiled).parts) >= 50


def test_a_capture_finds_room_beside_a_small_result_that_is_held() -> None:
    """It lies in a large block that was given back: the rest of the block is free."""
    layers = _layers()
    compiled = _compiled(layers)
    with torch.no_grad():
        for _ in range(6):
            y = compiled(_whole_numbers(8192))
        del y
        for _ in range(4):
            small = compiled(_whole_numbers(512))
        del small
        before = _pool_bytes(compiled)
        x = _whole_numbers(512)
        small, expected = compiled(x), layers(x)  # given back before, held now
        held = [small]
        for _ in range(4):
            x = _whole_numbers(4096)
            y = compiled(x)
            assert torch.equal(y, layers(x))
            assert torch.equal(held[0], expected)
    assert _pool_bytes(compiled) <= before + 2 * MIB
