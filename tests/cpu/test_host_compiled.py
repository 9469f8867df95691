"""HostGraph on functions that Inductor compiled for the CPU."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from helpers.host_captures import captured, capturing, names

from graphcap_backend.capture.host import HostGraph

# torch 2.13 warns of its own code when Inductor is first imported.
pytestmark = pytest.mark.filterwarnings("ignore:.*script_method.*:DeprecationWarning")


class Mlp(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(8, 16)
        self.down = torch.nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(self.down(torch.nn.functional.gelu(self.up(x))) + x, -1)


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def patched_kernels() -> list[str]:
    modules = [m for n, m in list(sys.modules.items()) if "compile_tasks" in n]
    return [n for m in modules for n, v in vars(m).items() if type(v).__name__.endswith("Patch")]


def test_generated_kernels_and_extern_calls_are_nodes() -> None:
    model, x = Mlp().eval(), torch.randn(4, 8)
    compiled = torch.compile(model)
    with torch.no_grad():
        compiled(x)
        graph, y = captured(lambda: compiled(x))
        assert [n for n in names(graph) if n.startswith("aten.")] == ["aten.addmm.out"] * 2
        assert len([n for n in names(graph) if n.startswith("cpp_fused_")]) == 2
        for _ in range(2):
            x.normal_()
            graph.replay()
            torch.testing.assert_close(y, model(x))
    assert patched_kernels() == []


def test_first_call_inside_the_capture_compiles_and_is_recorded() -> None:
    @torch.compile
    def function(x: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
        total.add_(x.sum())
        return (x * 2).cos()

    x, total = torch.ones(5), torch.zeros(())
    graph, y = captured(lambda: function(x, total))
    assert total.item() == 0
    assert names(graph)
    assert all(name.startswith("cpp_fused_") for name in names(graph))
    assert patched_kernels() == []
    graph.replay()
    x.fill_(2)
    graph.replay()
    assert total.item() == 15
    torch.testing.assert_close(y, (x * 2).cos())


@pytest.mark.parametrize("warm", [True, False])
def test_training_step(warm: bool) -> None:
    model, x = Mlp(), torch.randn(4, 8)
    compiled = torch.compile(model)
    if warm:
        (compiled(x) ** 2).sum().backward()
        model.zero_grad()
    graph, _ = captured(lambda: (compiled(x) ** 2).sum().backward())
    buffers = [p.grad for p in model.parameters()]
    assert all(buffer is not None for buffer in buffers)
    for _ in range(2):
        x.normal_()
        graph.replay()
        got = [buffer.clone() for buffer in buffers if buffer is not None]
        model.zero_grad()
        (model(x) ** 2).sum().backward()
        for p, value, buffer in zip(model.parameters(), got, buffers, strict=True):
            torch.testing.assert_close(value, p.grad)
            p.grad = buffer


def test_dropout_draws_fresh_numbers_and_capture_leaves_the_state() -> None:
    @torch.compile
    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.dropout(x + 1, 0.5)

    x = torch.ones(256)
    function(x)
    torch.manual_seed(3)
    expected = [function(x).clone() for _ in range(2)]
    torch.manual_seed(3)
    graph, y = captured(lambda: function(x))
    for value in expected:
        graph.replay()
        assert torch.equal(y, value)


def test_a_written_input_is_written_by_replays_only() -> None:
    @torch.compile
    def function(x: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return x * 2

    x = torch.zeros(3)
    function(x)
    graph, y = captured(lambda: function(x))
    assert x.tolist() == [1, 1, 1]
    graph.replay()
    graph.replay()
    assert (x.tolist(), y.tolist()) == ([3, 3, 3], [6, 6, 6])


def test_fallback_ops_see_values_of_the_kernels_before_them() -> None:
    @torch.compile
    def function(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        index = (x * 0).long()
        return torch.ops.aten.index_select(table, 0, index).sin() + torch.cumsum(x, 0)

    x, table = torch.randn(6), torch.randn(3)
    function(x, table)
    graph, y = captured(lambda: function(x, table))
    x.normal_()
    graph.replay()
    torch.testing.assert_close(y, table[0].sin() + torch.cumsum(x, 0))


def test_eager_and_compiled_mixed_with_a_graph_break_and_dynamic_sizes() -> None:
    @torch.compile(dynamic=True)
    def function(x: torch.Tensor) -> torch.Tensor:
        y = (x + 1).relu()
        torch._dynamo.graph_break()
        return y.sum(0) * x.shape[0]

    x = torch.randn(3, 4)
    function(torch.randn(5, 4))
    graph, y = captured(lambda: (function(x.neg_()) + 1).exp())
    for _ in range(2):
        before = x.clone()
        graph.replay()
        torch.testing.assert_close(y, (((-before + 1).relu()).sum(0) * 3 + 1).exp())


def test_outputs_captured_under_inference_mode_are_ordinary_tensors() -> None:
    @torch.compile
    def function(x: torch.Tensor) -> torch.Tensor:
        return (x @ x + 1).relu()

    x = torch.randn(4, 4)
    with torch.inference_mode():
        function(x)
        graph, y = captured(lambda: function(x))
    assert not y.is_inference()
    graph.replay()
    torch.testing.assert_close(y, (x @ x + 1).relu())


def _in_thread(work: Callable[[], Any]) -> None:
    errors: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - raised on the calling thread below
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


def test_another_thread_calls_the_same_kernel_while_one_captures() -> None:
    @torch.compile
    def function(x: torch.Tensor) -> torch.Tensor:
        return (x * 3).sin() + 1

    x, other = torch.ones(4), torch.full((4,), 2.0)
    function(x)
    seen: list[torch.Tensor] = []
    graph = HostGraph()
    with capturing(graph):
        y = function(x)
        _in_thread(lambda: seen.append(function(other)))
    torch.testing.assert_close(seen[0], (other * 3).sin() + 1)
    assert len(graph.nodes) == 1
    graph.replay()
    torch.testing.assert_close(y, (x * 3).sin() + 1)


def test_captures_of_two_threads_may_end_in_any_order() -> None:
    @torch.compile
    def function(x: torch.Tensor) -> torch.Tensor:
        return (x * 3).sin() + 1

    x = torch.ones(4)
    function(x)
    first = HostGraph()
    second_began, first_ended = threading.Event(), threading.Event()
    recorded: list[list[str]] = []

    def second() -> None:
        graph = HostGraph()
        with capturing(graph):
            second_began.set()
            assert first_ended.wait(60)
            function(x)
        recorded.append(names(graph))

    thread = threading.Thread(target=second)
    with capturing(first):
        thread.start()
        assert second_began.wait(60)
        function(x)
    first_ended.set()
    thread.join()
    assert len(names(first)) == 1
    assert recorded == [names(first)]
    assert patched_kernels() == []


def test_the_listener_is_called_below_the_generated_wrapper() -> None:
    model, x = Mlp().eval(), torch.randn(4, 8)
    compiled = torch.compile(model)
    stacks: list[list[str]] = []

    def listener(graph_handle: int, node: int) -> None:
        frame, files = sys._getframe(1), []
        while frame is not None:
            files.append(frame.f_code.co_filename)
            frame = frame.f_back  # type: ignore[assignment]
        stacks.append(files)

    with torch.no_grad():
        compiled(x)
        wrappers = {m.__file__ for n, m in sys.modules.items() if "compile_tasks" in n}
        graph = HostGraph()
        graph.launch_listener = listener
        with capturing(graph):
            compiled(x)
    assert len(stacks) == 4
    assert all(wrappers.intersection(files) for files in stacks)


def test_failed_capture_takes_the_patches_off() -> None:
    @torch.compile
    def function(x: torch.Tensor) -> torch.Tensor:
        return x.sin() + 1

    x = torch.ones(3)
    function(x)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            captured(lambda: function(x) / (1 // 0))
        assert patched_kernels() == []
    torch.testing.assert_close(function(x), x.sin() + 1)


def test_inductor_first_loaded_inside_the_capture_is_an_error() -> None:
    program = """
import torch
from graphcap_backend.capture.host import HostGraph
from graphcap_backend.errors import NotWarmedUpError
graph = HostGraph()
graph.capture_begin()
torch.compile(lambda x: x.sin() + 1)(torch.ones(3))
try:
    graph.capture_end()
except NotWarmedUpError as error:
    assert "Call it once before" in str(error)
    assert torch._C._len_torch_dispatch_stack() == 0
    print("refused")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "refused\n"
