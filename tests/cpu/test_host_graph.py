"""HostGraph on eager code: what a capture shows, what a replay does, what is refused."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.host_captures import captured, capturing, names
from torch._prims.rng_prims import run_and_save_rng_state
from torch.utils._python_dispatch import TorchDispatchMode

from graphcap_backend.capture.host import HostGraph
from graphcap_backend.capture.nodes import Memcpy, Memset, NodeKind
from graphcap_backend.errors import CaptureError, GraphcapError, NestedCaptureError


def test_capture_leaves_outside_tensors_alone_and_replay_writes_them() -> None:
    x, total = torch.ones(3), torch.zeros(3)
    graph = HostGraph()
    with capturing(graph):
        doubled = x * 2
        assert total.add_(doubled) is total
        assert total.tolist() == [0, 0, 0]
        total.mul_(10)
    assert total.tolist() == [0, 0, 0]
    graph.replay()
    assert total.tolist() == [20, 20, 20]
    x.fill_(1.5)
    graph.replay()
    assert total.tolist() == [230, 230, 230]
    assert doubled.tolist() == [3, 3, 3]
    assert names(graph) == ["aten.mul.Tensor", "aten.add_.Tensor", "aten.mul_.Tensor"]


def test_values_inside_the_capture_are_those_of_an_eager_run() -> None:
    # An index that is out of range before the captured zero_() must not fail the capture.
    index, table = torch.tensor([100]), torch.arange(4.0)
    graph, row = captured(lambda: table[index.zero_()])
    assert index.tolist() == [100]
    graph.replay()
    assert (index.tolist(), row.tolist()) == ([0], [0.0])


def test_replay_runs_no_python_of_the_user() -> None:
    calls = []

    def function() -> torch.Tensor:
        calls.append(1)
        return x + 1

    x = torch.zeros(2)
    graph, y = captured(function)
    x.fill_(5)
    graph.replay()
    graph.replay()
    assert (len(calls), y.tolist()) == (1, [6, 6])


def test_memory_made_inside_is_filled_anew_by_each_replay() -> None:
    def function() -> tuple[torch.Tensor, ...]:
        zeros, constant, steps = torch.zeros(2), torch.tensor([1.0, 2.0]), torch.arange(3)
        return zeros.add_(x), constant.add_(x), steps.mul_(2)

    x = torch.ones(2)
    graph, (zeros, constant, steps) = captured(function)
    for _ in range(2):
        graph.replay()
        assert zeros.tolist() == [1, 1]
        assert constant.tolist() == [2, 3]
        assert steps.tolist() == [0, 2, 4]


def test_views_and_allocations_are_not_launches() -> None:
    x = torch.randn(4, 6)

    def function() -> torch.Tensor:
        flat = x.t().unsqueeze(0).expand(2, 6, 4).transpose(0, 1)[1:]
        torch.empty(3)
        torch.empty_like(x).t_()
        return flat.detach()

    graph, view = captured(function)
    assert names(graph) == []
    assert view.data_ptr() == x.t()[1:].data_ptr()


def test_work_on_no_elements_is_no_launch_but_a_reduction_of_none_is() -> None:
    x = torch.ones(0, 3)
    graph, (_, total) = captured(lambda: (x + 1, x.sum()))
    assert names(graph) == ["aten.sum.default"]
    graph.replay()
    assert total.item() == 0


def test_kinds_of_nodes() -> None:
    x, y = torch.randn(4, 4), torch.randn(4, 4)
    counts = torch.ones(5, dtype=torch.int32)
    half = torch.empty(4, 4, dtype=torch.bfloat16)

    def function() -> None:
        x.copy_(y)
        x.t().copy_(y)
        half.copy_(y)
        x.zero_()
        counts.fill_(7)
        x.clone()
        x.add_(1)

    graph, _ = captured(function)
    kinds = [node.kind for node in graph.nodes]
    kernel, memcpy, memset = NodeKind.KERNEL, NodeKind.MEMCPY, NodeKind.MEMSET
    assert kinds == [memcpy, kernel, kernel, memset, memset, memcpy, kernel]
    assert graph.nodes[0].memcpy == Memcpy(source="host", destination="host", num_bytes=64)
    assert graph.nodes[3].memset == Memset(value=0, element_bytes=1, num_bytes=64)
    assert graph.nodes[4].memset == Memset(value=7, element_bytes=4, num_bytes=20)
    assert [node.dependencies for node in graph.nodes] == [(), (0,), (1,), (2,), (3,), (4,), (5,)]


def test_out_argument_is_written_by_the_replay_only() -> None:
    x, out = torch.ones(2, 2), torch.zeros(2, 2)
    graph, result = captured(lambda: torch.addmm(x, x, x, out=out))
    assert result is out
    assert out.sum().item() == 0
    graph.replay()
    assert out.tolist() == [[3, 3], [3, 3]]
    assert names(graph) == ["aten.addmm.out"]


def test_out_argument_made_inside_may_grow_outside_may_not() -> None:
    x = torch.ones(3)
    graph, out = captured(lambda: torch.add(x, x, out=torch.empty(0)))
    x.fill_(2)
    graph.replay()
    assert out.tolist() == [4, 4, 4]
    outside = torch.empty(0)
    with pytest.raises(CaptureError, match="would resize a tensor from outside the capture"):
        captured(lambda: torch.add(x, x, out=outside))
    assert outside.shape == (0,)


def test_writes_through_a_view_of_an_outside_tensor() -> None:
    base = torch.zeros(4, 4)
    graph, row_sum = captured(lambda: (base[1].add_(1), base.t()[0].fill_(2), base.sum())[2])
    assert base.sum().item() == 0
    graph.replay()
    assert base[1].tolist() == [2, 1, 1, 1]
    assert row_sum.item() == 11


def test_foreach_and_lists() -> None:
    tensors = [torch.ones(2), torch.ones(3)]
    graph, sums = captured(lambda: (torch._foreach_add_(tensors, 1), torch._foreach_mul(tensors, 3))[1])
    assert tensors[1].tolist() == [1, 1, 1]
    graph.replay()
    assert [t.tolist() for t in tensors] == [[2, 2], [2, 2, 2]]
    assert [t.tolist() for t in sums] == [[6, 6], [6, 6, 6]]


def test_batch_norm_statistics_are_written_by_replays_only() -> None:
    # The schema of native_batch_norm does not say that it writes them.
    norm, reference = torch.nn.BatchNorm1d(3), torch.nn.BatchNorm1d(3)
    x = torch.randn(8, 3)
    graph, y = captured(lambda: norm(x))
    assert norm.running_mean is not None
    assert norm.num_batches_tracked is not None
    assert norm.running_mean.tolist() == [0, 0, 0]
    for count in (1, 2):
        x.normal_()
        graph.replay()
        torch.testing.assert_close(y, reference(x))
        torch.testing.assert_close(norm.running_mean, reference.running_mean)
        assert norm.num_batches_tracked.item() == count


def test_backward_inside_the_capture() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.Linear(8, 1))
    x = torch.randn(5, 4)
    graph = HostGraph()
    with capturing(graph):
        model(x).sum().backward()
    buffers = [p.grad for p in model.parameters()]
    for _ in range(2):
        x.normal_()
        graph.replay()
        got = [b.clone() for b in buffers if b is not None]
        model.zero_grad()
        model(x).sum().backward()
        for p, value, buffer in zip(model.parameters(), got, buffers, strict=True):
            assert p.grad is not buffer
            torch.testing.assert_close(value, p.grad)
            p.grad = buffer


def test_backward_warmed_up_with_the_loss_kept_alive() -> None:
    """On CUDA: test_warmed_up_on_a_side_stream_captured_on_another."""
    model, x = torch.nn.Linear(4, 4), torch.randn(3, 4)
    for _ in range(2):
        loss = model(x).square().sum()
        loss.backward()
    before = loss.item()
    model.zero_grad()
    graph = HostGraph()
    with capturing(graph):
        second = model(x).square().sum()
        second.backward()
    for _ in range(2):
        x.normal_()
        graph.replay()
        expected = torch.autograd.grad(model(x).square().sum(), tuple(model.parameters()))
        torch.testing.assert_close([p.grad for p in model.parameters()], list(expected))
    assert loss.item() == before


def test_backward_adds_to_gradients_that_exist() -> None:
    w = torch.ones(3, requires_grad=True)
    w.grad = torch.full((3,), 10.0)
    graph, _ = captured(lambda: (w * 2).sum().backward())
    assert w.grad.tolist() == [10, 10, 10]
    graph.replay()
    graph.replay()
    assert w.grad.tolist() == [14, 14, 14]


def test_optimizer_step_on_leaves() -> None:
    w = torch.ones(3, requires_grad=True)
    w.grad = torch.ones(3)
    optimizer = torch.optim.SGD([w], lr=0.5, momentum=0.9)
    optimizer.step()
    graph, _ = captured(optimizer.step)
    assert w.tolist() == [0.5] * 3
    graph.replay()
    assert w.tolist() == pytest.approx([0.5 - 0.5 * 1.9] * 3)
    assert w.is_leaf


def test_replay_does_not_disturb_autograd_of_the_caller() -> None:
    x = torch.ones(3, requires_grad=True)
    buffer = torch.zeros(3)
    graph, _ = captured(lambda: buffer.copy_(x.detach() * 3))
    kept = (x * buffer).sum()  # saves buffer for backward
    version = buffer._version
    graph.replay()
    assert buffer._version == version
    kept.backward()
    assert buffer.requires_grad is False


@pytest.mark.parametrize("captured_in", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("replayed_in", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_grad_modes_mix(captured_in: Callable[[], Any], replayed_in: Callable[[], Any]) -> None:
    x = torch.ones(2, 2)
    linear = torch.nn.Linear(2, 2)
    with captured_in():
        graph, y = captured(lambda: linear(x).reshape(4).relu_().add_(1))
    x.fill_(3)
    with replayed_in():
        graph.replay()
    torch.testing.assert_close(y.detach(), linear(x).reshape(4).relu().add(1).detach())
    assert not y.is_inference()
    assert names(graph)[-3:] == ["aten.addmm.default", "aten.relu_.default", "aten.add_.Tensor"]


def test_inference_tensors_may_be_written_by_replays() -> None:
    with torch.inference_mode():
        x = torch.ones(2)
        graph, _ = captured(lambda: x.add_(1))
    graph.replay()
    assert x.tolist() == [2, 2]


def test_replay_ignores_autocast_and_modes_round_it() -> None:
    class Count(TorchDispatchMode):
        calls = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            Count.calls += 1
            return func(*args, **(kwargs or {}))

    x = torch.randn(4, 4)
    graph, y = captured(lambda: x @ x)
    x.normal_()
    with Count(), torch.autocast("cpu", dtype=torch.bfloat16):
        graph.replay()
    assert Count.calls == 0
    assert torch.equal(y, x @ x)


def test_autocast_inside_the_capture_is_kept() -> None:
    x = torch.randn(4, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        graph, y = captured(lambda: x @ x)
    x.normal_()
    graph.replay()
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, x.bfloat16() @ x.bfloat16())


def test_modes_of_the_user_see_their_ops_and_may_change_them() -> None:
    class AddBecomesMul(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[str] = []

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.seen.append(str(func))
            if func is torch.ops.aten.add.Tensor:
                return torch.ops.aten.mul.Tensor(*args)
            return func(*args, **(kwargs or {}))

    x, graph = torch.full((2,), 3.0), HostGraph()
    mode = AddBecomesMul()
    with mode:
        with capturing(graph):
            outer = x + 5
            with AddBecomesMul():
                inner = x + 6
        x.clone()
    assert names(graph) == ["aten.mul.Tensor", "aten.mul.Tensor"]
    assert "aten.clone.default" in mode.seen
    assert torch._C._len_torch_dispatch_stack() == 0
    x.fill_(2)
    graph.replay()
    assert (outer.tolist(), inner.tolist()) == ([10, 10], [12, 12])


def test_random_numbers() -> None:
    generator = torch.Generator().manual_seed(1)
    torch.manual_seed(0)
    before = (torch.get_rng_state(), generator.get_state())
    graph, (a, b) = captured(lambda: (torch.rand(4), torch.rand(4, generator=generator)))
    assert torch.equal(before[0], torch.get_rng_state())
    assert torch.equal(before[1], generator.get_state())
    graph.replay()
    first = (a.clone(), b.clone())
    graph.replay()
    assert not torch.equal(a, first[0])
    assert not torch.equal(b, first[1])
    torch.manual_seed(0)
    generator.manual_seed(1)
    assert torch.equal(first[0], torch.rand(4))
    assert torch.equal(first[1], torch.rand(4, generator=generator))


@pytest.mark.parametrize(
    ("function", "operator"),
    [
        (lambda x: x.sum().item(), "aten._local_scalar_dense.default"),
        (lambda x: bool((x > 0).all()), "aten._local_scalar_dense.default"),
        (lambda x: x.nonzero(), "aten.nonzero.default"),
        (lambda x: x[x > 0], "aten.index.Tensor"),
        (lambda x: torch.masked_select(x, x > 0), "aten.masked_select.default"),
        (lambda x: torch.unique(x), "aten._unique2.default"),
        (lambda x: torch.equal(x, x + 1), "aten.equal.default"),
        (lambda x: torch.repeat_interleave(x, torch.ones(4, dtype=torch.long)), "aten.repeat_interleave"),
        (lambda x: x.resize_(9), "aten.resize_.default"),
        (lambda x: x.set_(torch.ones(2)), "aten.set_.source_Tensor"),
        (lambda x: x.to_sparse().add(1), "sparse"),
    ],
)
def test_what_cannot_be_captured_says_so(function: Callable[[torch.Tensor], Any], operator: str) -> None:
    x = torch.ones(4)
    with pytest.raises(CaptureError, match=operator):
        captured(lambda: function(x))
    assert x.shape == (4,)
    assert torch._C._len_torch_dispatch_stack() == 0
    captured(lambda: x + 1)


def test_a_failure_that_the_caller_swallowed_still_fails_the_capture() -> None:
    x, graph = torch.ones(3), HostGraph()
    graph.capture_begin()
    with pytest.raises(CaptureError):
        x.sum().item()
    with pytest.raises(CaptureError, match=r"not valid.*_local_scalar_dense"):
        graph.capture_end()
    with pytest.raises(GraphcapError, match="needs a captured graph"):
        graph.replay()
    with capturing(graph):
        x.add_(1)
    graph.replay()
    assert x.tolist() == [2, 2, 2]


def test_an_ordinary_error_of_an_op_is_the_users_to_catch() -> None:
    x, graph = torch.ones(3), HostGraph()
    with capturing(graph):
        with pytest.raises(RuntimeError, match="must match"):
            x + torch.ones(4)
        y = x + 1
    assert names(graph) == ["aten.ones.default", "aten.add.Tensor"]
    graph.replay()
    assert y.tolist() == [2, 2, 2]


def test_integer_index_may_be_captured_boolean_may_not() -> None:
    x, index = torch.arange(5.0), torch.tensor([4, 0])
    graph, picked = captured(lambda: x[index])
    index.copy_(torch.tensor([1, 2]))
    graph.replay()
    assert picked.tolist() == [1, 2]


def test_nested_begin_leaves_the_outer_capture_alone() -> None:
    x, outer = torch.ones(2), HostGraph()
    with capturing(outer):
        with pytest.raises(NestedCaptureError):
            HostGraph().capture_begin()
        with pytest.raises(NestedCaptureError):
            outer.capture_begin()
        y = x + 1
    x.fill_(4)
    outer.replay()
    assert y.tolist() == [5, 5]


def test_states() -> None:
    graph = HostGraph()
    for call in (graph.replay, graph.instantiate, graph.pool):
        with pytest.raises(GraphcapError, match="needs a captured graph"):
            call()
    with pytest.raises(CaptureError, match="no capture is on"):
        graph.capture_end()
    graph.abort_capture()
    with pytest.raises(TypeError, match="pool is int"):
        graph.capture_begin(pool=3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"'loose'.*relaxed"):
        graph.capture_begin(capture_error_mode="loose")
    x = torch.ones(2)
    with capturing(graph):
        x.add_(1)
    with pytest.raises(CaptureError, match="reset"):
        graph.capture_begin()
    with pytest.raises(GraphcapError, match="keep_graph=True"):
        graph.instantiate()
    first = graph.graph_id
    assert graph.pool() == (first, 0)
    graph.reset()
    assert (graph.graph_id, graph.exec_id, len(graph.nodes)) == (0, None, 0)
    with capturing(graph):
        x.add_(1)
    assert graph.graph_id > first


def test_keep_graph_instantiates_late_and_again() -> None:
    x = torch.zeros(2)
    graph, _ = captured(lambda: x.add_(1), keep_graph=True)
    assert graph.keep_graph
    assert graph.exec_id is None
    graph.replay()
    first = graph.exec_id
    assert first is not None
    graph.instantiate()
    assert graph.exec_id is not None
    assert graph.exec_id > first
    graph.replay()
    assert x.tolist() == [2, 2]


def test_pool_token_of_another_graph_is_kept() -> None:
    first, _ = captured(lambda: torch.ones(1))
    second = HostGraph()
    second.capture_begin(pool=first.pool())
    second.capture_end()
    assert second.pool() == first.pool()


def test_listener_hears_each_launch_and_its_error_fails_the_capture() -> None:
    x, heard, graph = torch.ones(2), list[tuple[int, int]](), HostGraph()
    graph.launch_listener = lambda graph_handle, node: heard.append((graph_handle, node))
    with capturing(graph):
        x.t().add_(1).mul_(2)
    assert heard == [(0, 0), (0, 1)]

    def broken(graph_handle: int, node: int) -> None:
        raise ZeroDivisionError

    other = HostGraph()
    other.launch_listener = broken
    with pytest.raises(ZeroDivisionError), capturing(other):
        x.add_(1)
    assert x.tolist() == [1, 1]


def test_reset_and_deletion_free_the_buffers() -> None:
    x = torch.ones(1000)
    graph, y = captured(lambda: x + 1)
    memory = weakref.ref(y.untyped_storage())
    inside = weakref.ref(graph)
    del y
    graph.reset()
    gc.collect()
    assert memory() is None
    del graph
    assert inside() is None


def test_inputs_live_as_long_as_the_graph() -> None:
    def make() -> tuple[HostGraph, torch.Tensor]:
        x = torch.full((1000,), 3.0)
        return captured(lambda: x * 2)

    graph, y = make()
    torch.full((1000,), 9.0)
    y.zero_()
    graph.replay()
    assert y[0].item() == 6


def test_other_threads_are_not_recorded() -> None:
    x, other = torch.ones(2), torch.zeros(2)
    graph = HostGraph()
    with capturing(graph):
        thread = threading.Thread(target=lambda: other.add_(1))
        thread.start()
        thread.join()
        x + 1
    assert other.tolist() == [1, 1]
    assert names(graph) == ["aten.add.Tensor"]


def test_two_threads_capture_at_once() -> None:
    barrier, results = threading.Barrier(2), dict[int, list[str]]()

    def work(number: int) -> None:
        x, graph = torch.full((2,), float(number)), HostGraph()
        with capturing(graph):
            barrier.wait()
            y = x + 1 if number else x * 3
            barrier.wait()
        graph.replay()
        results[number] = [*names(graph), str(y.tolist())]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {0: ["aten.mul.Tensor", "[0.0, 0.0]"], 1: ["aten.add.Tensor", "[2.0, 2.0]"]}


def test_replays_from_many_threads_take_turns() -> None:
    count = torch.zeros(1)
    graph, _ = captured(lambda: count.copy_(count + 1))
    threads = [threading.Thread(target=lambda: [graph.replay() for _ in range(50)]) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert count.item() == 400


def test_capture_ends_on_the_thread_it_began_on() -> None:
    graph, errors = HostGraph(), list[BaseException]()

    def end() -> None:
        try:
            graph.capture_end()
        except CaptureError as error:
            errors.append(error)

    with capturing(graph):
        thread = threading.Thread(target=end)
        thread.start()
        thread.join()
    assert "another thread" in str(errors[0])


def test_operators_written_in_python_are_recorded_by_what_they_launch() -> None:
    calls = []

    @torch.library.custom_op("graphcap_test::scaled", mutates_args=())
    def scaled(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return x * 2 + 1

    @torch.library.custom_op("graphcap_test::bump_", mutates_args={"x"})
    def bump_(x: torch.Tensor) -> None:
        calls.append(2)
        x.add_(1)

    x = torch.ones(2)
    graph, y = captured(lambda: (bump_(x), scaled(x))[1])
    assert names(graph) == ["aten.add_.Tensor", "aten.mul.Tensor", "aten.add.Tensor"]
    graph.replay()
    assert (x.tolist(), y.tolist(), calls) == ([2, 2], [5, 5], [2, 1])


def test_higher_order_operators_are_refused() -> None:
    x = torch.ones(2)
    with pytest.raises(CaptureError, match=r"higher-order operator cond .* depends on values, compiled or not"):
        captured(lambda: torch.cond(x.sum() > 0, lambda: x + 1, lambda: x - 1, ()))
    assert torch._C._len_torch_dispatch_stack() == 0


def test_the_random_state_of_a_checkpoint_is_refused_with_its_reason() -> None:
    x = torch.ones(2)
    with pytest.raises(CaptureError, match=r"run_and_save_rng_state .*random state, so that torch\.utils\.checkpoint"):
        captured(lambda: run_and_save_rng_state(torch.ops.aten.rand_like.default, x))
    assert torch._C._len_torch_dispatch_stack() == 0


def test_nothing_grows_over_many_captures() -> None:
    x = torch.ones(8)
    graph = HostGraph()
    for _ in range(300):
        with capturing(graph):
            x.add_(1)
        graph.reset()
    assert x.tolist() == [1] * 8


def test_a_tensor_on_another_device_is_refused() -> None:
    x = torch.ones(2)
    with pytest.raises(CaptureError, match=r"torch\.cuda\.CUDAGraph"):
        captured(lambda: torch.ops.aten._to_copy.default(x, device="cuda"))
    graph, meta = captured(lambda: torch.ones(2, device="meta") + 1)
    assert (names(graph), meta.device.type) == ([], "meta")
