"""check_input_liveness on CUDA."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
from helpers.cuda_state import need_cuda
from torch import Tensor

from graphcap_backend import InputLivenessError, graph, graph_pool_handle


@pytest.fixture(autouse=True)
def _device() -> None:
    need_cuda()


def _watched(use: Callable[[Tensor], object], x: Tensor) -> tuple[torch.cuda.CUDAGraph, object]:
    g = torch.cuda.CUDAGraph()
    with graph(g, check_input_liveness=True):
        result = use(x)
    return g, result


def test_freed_input_is_told_with_its_stacks() -> None:
    x = torch.ones(1024, device="cuda")
    g, y = _watched(lambda t: t * 2, x)
    g.replay()
    assert isinstance(y, Tensor)
    assert y[0].item() == 2
    del x  # freed here
    for _ in range(2):
        with pytest.raises(InputLivenessError, match=r"float32 tensor of shape \(1024,\) on cuda:0") as raised:
            g.replay()
        used, freed = str(raised.value).split("first used in the capture:")[1].split("freed:")
        assert "<lambda>" in used.splitlines()[1]
        assert freed.splitlines()[1].endswith("test_freed_input_is_told_with_its_stacks")


def test_where_it_was_made_is_told_if_torch_knows() -> None:
    torch.cuda.memory._record_memory_history(stacks="python")
    try:
        x = torch.ones(1 << 22, device="cuda")
        g, _ = _watched(lambda t: t * 2, x)
        del x
        with pytest.raises(InputLivenessError) as raised:
            g.replay()
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
    made = str(raised.value).split("made:")[1].split("first used")[0]
    assert "test_where_it_was_made_is_told_if_torch_knows" in made


@pytest.mark.parametrize(
    "use",
    [
        lambda t: t[2:5] + 1,
        lambda t: t.view(2, 4).t().neg(),
        lambda t: t.add_(1) is None,
        lambda t: torch.cat([torch.zeros(1, device="cuda"), t]),
        lambda t: torch.empty_like(t).copy_(t),
    ],
    ids=["slice", "view of a view", "in place", "in a list", "copy"],
)
def test_every_way_to_use_memory_counts(use: Callable[[Tensor], object]) -> None:
    x = torch.ones(8, device="cuda")
    g, _ = _watched(use, x)
    g.replay()
    del x
    with pytest.raises(InputLivenessError, match="1 tensor"):
        g.replay()


@pytest.mark.parametrize("use", [lambda t: t.view(2, 4), lambda t: torch.empty_like(t), lambda t: t.detach()])
def test_operations_that_launch_nothing_do_not_count(use: Callable[[Tensor], object]) -> None:
    x, y = torch.ones(8, device="cuda"), torch.ones(8, device="cuda")
    g, _ = _watched(lambda t: (use(t) is None, y + 1), x)
    del x
    g.replay()
    torch.cuda.synchronize()


def test_pinned_source_of_a_captured_copy() -> None:
    x = torch.ones(64, pin_memory=True)
    g, y = _watched(lambda t: torch.empty(64, device="cuda").copy_(t, non_blocking=True), x)
    g.replay()
    assert isinstance(y, Tensor)
    assert y[0].item() == 1
    del x
    with pytest.raises(InputLivenessError, match="on cpu"):
        g.replay()


def test_a_new_tensor_at_the_address_does_not_revive() -> None:
    x = torch.ones(1 << 20, device="cuda")
    address = x.data_ptr()
    g, _ = _watched(lambda t: t * 2, x)
    del x
    again = torch.ones(1 << 20, device="cuda")
    assert again.data_ptr() == address
    with pytest.raises(InputLivenessError):
        g.replay()


def test_memory_of_the_pool_is_no_input() -> None:
    pool = graph_pool_handle()
    x = torch.ones(8, device="cuda")
    first, second = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    with graph(first, pool=pool):
        y = x + 1
    with graph(second, pool=pool, check_input_liveness=True):
        z = y * 2
    del y
    first.replay()
    second.replay()
    assert z[0].item() == 4
    del x
    second.replay()  # the first graph's input is not the second's
    torch.cuda.synchronize()


def test_what_is_born_inside_is_no_input() -> None:
    x = torch.ones(8, device="cuda")
    compiled = torch.compile(lambda t: torch.softmax(t + 1, 0))
    compiled(x)
    g, _ = _watched(lambda t: ((compiled(t) + 1) * 2).relu_() is None, x)
    gc.collect()
    g.replay()
    torch.cuda.synchronize()


def test_input_of_a_compiled_region() -> None:
    compiled = torch.compile(lambda t, u: torch.softmax(t * u, 0))
    x, y = torch.ones(64, device="cuda"), torch.ones(64, device="cuda")
    compiled(x, y)
    g = torch.cuda.CUDAGraph()
    with graph(g, check_input_liveness=True):
        z = compiled(x, y)
    g.replay()
    torch.testing.assert_close(z, torch.softmax(x, 0))
    del y
    with pytest.raises(InputLivenessError, match="1 tensor"):
        g.replay()


def test_parameters_of_a_model_with_backward() -> None:
    model = torch.nn.Linear(16, 16, device="cuda")
    x = torch.randn(4, 16, device="cuda")
    model(x).sum().backward()
    model.zero_grad()
    g = torch.cuda.CUDAGraph()
    with graph(g, check_input_liveness=True):
        model(x).sum().backward()
    g.replay()
    torch.cuda.synchronize()
    del model
    gc.collect()
    with pytest.raises(InputLivenessError):
        g.replay()


def test_the_check_ends_with_its_capture() -> None:
    x, y = torch.ones(8, device="cuda"), torch.ones(8, device="cuda")
    g, _ = _watched(lambda t: t + 1, x)
    del x
    g.reset()
    with torch.cuda.graph(g):
        z = y + 1
    g.replay()
    assert z[0].item() == 2
    assert "replay" not in vars(g)
