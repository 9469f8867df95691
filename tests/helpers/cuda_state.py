"""Device state that a failed capture must leave as it was."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from helpers.faulty_graphs import nothing_left_behind


def need_cuda() -> None:
    """Skip the running test without a GPU."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


def reserved() -> int:
    """Reserved bytes once everything dead is given back."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved()


@contextmanager
def device_left_as_it_was() -> Iterator[None]:
    """Check current stream and device, routing and size of the allocator, generator, pinned memory."""
    # Graphs register with the generator, which keeps two numbers on the device while one of them lives.
    registered, small = torch.cuda.CUDAGraph(), torch.ones(1, device="cuda")
    with torch.cuda.graph(registered):
        small.add_(1)
    stream, device, before = torch.cuda.current_stream(), torch.cuda.current_device(), reserved()
    generator = torch.cuda.get_rng_state()
    with nothing_left_behind():
        yield
    assert torch.cuda.current_stream() == stream
    assert torch.cuda.current_device() == device
    assert not torch.cuda.is_current_stream_capturing()
    assert reserved() == before
    assert torch.equal(torch.cuda.get_rng_state(), generator)
    # Eager work, random numbers (a capture cut short would leave the generator refusing) and new memory.
    with torch.random.fork_rng(devices=[device]):
        assert torch.rand(1 << 22, device="cuda").mean().item() == pytest.approx(0.5, abs=0.01)
    assert torch.empty(64, pin_memory=True).is_pinned()
    assert torch.cuda.memory_allocated() >= 0
    assert reserved() == before
    registered.reset()


def good_capture_works() -> None:
    """A new capture of everything: random numbers, memory of its own, replays."""
    from graphcap_backend import capture_nodes, graph

    x = torch.ones(1 << 20, device="cuda")
    g = torch.cuda.CUDAGraph()
    with graph(g):
        y = torch.nn.functional.dropout(x, 0.5) + 1
    g.replay()
    first = y.clone()
    g.replay()
    assert not torch.equal(first, y)
    assert set(y.unique().tolist()) == {1.0, 3.0}
    assert len(capture_nodes(g)) >= 2
