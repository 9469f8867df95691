"""The backend's scenarios on CUDA: the same as on HostGraph, and those that only a GPU has."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from helpers import (
    backend_chains,
    backend_control_flow,
    backend_inputs,
    backend_life,
    backend_models,
    backend_outputs,
    backend_shapes,
    backend_training,
)
from helpers.backend_calls import (
    DifferentValuesError,
    Scenario,
    assert_captured,
    assert_same,
    compiled,
    fresh_compiler,
    inputs_of,
    parts,
    plain_inductor_differs,
    scenario_name,
    scenarios,
)
from torch import Tensor, nn

from graphcap_backend import graph
from graphcap_backend.errors import NotWarmedUpError

# Dynamo of torch 2.14 asks inputs that are no leaves for their gradient; Inductor recommends TF32.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning"),
]

TOPICS = (
    backend_chains,
    backend_control_flow,
    backend_outputs,
    backend_training,
    backend_inputs,
    backend_shapes,
    backend_life,
    backend_models,
)


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    with fresh_compiler():
        yield


@pytest.mark.parametrize("scenario", [s for topic in TOPICS for s in scenarios(topic)], ids=scenario_name)
def test_scenario(scenario: Scenario) -> None:
    try:
        scenario("cuda")
    except DifferentValuesError:
        # The backend returns what plain Inductor returns, whatever that is.
        if plain_inductor_differs(scenario, "cuda"):
            pytest.skip(f"needs a torch whose own compile gives eager's values here; {torch.__version__} does not")
        raise


def wave(x: Tensor) -> Tensor:
    return (x * 2 + 1) * x.flip(0)


def test_partitions_round_work_that_cannot_be_captured() -> None:
    def mixed(x: Tensor) -> Tensor:
        y = (x + 1).relu()
        moved = y.cpu() * 2  # on the CPU: splits the graph
        return moved.to(x.device).sin() + y

    fast = compiled(mixed, "cuda", graph_partition=True)
    held = []
    for x in inputs_of("cuda", 64, calls=8):
        held.append((fast(x), mixed(x)))
        for got, expected in held[-2:]:
            assert_same(got, expected)
    found = parts(fast)
    assert any(part.num_partitions > 1 and part.state == "captured" for part in found) or all(
        part.reasons for part in found
    ), [str(part) for part in found]


def test_cpu_scalar_input_follows_the_call() -> None:
    def scale(x: Tensor, factor: Tensor) -> Tensor:
        return (x * factor).sin() + factor

    fast = compiled(scale, "cuda")
    for i, x in enumerate(inputs_of("cuda", 16, calls=8)):
        factor = torch.tensor(float(i))
        assert_same(fast(x, factor), scale(x, factor))


def test_tensors_of_two_devices() -> None:
    def move(x: Tensor, y: Tensor) -> Tensor:
        return x * 2 + y.to(x.device)

    fast = compiled(move, "cuda")
    for x in inputs_of("cuda", 16):
        y = torch.randn(16)
        assert_same(fast(x, y), move(x, y))


def test_calls_on_several_streams() -> None:
    """A replay is ordered behind the last one, and behind the inputs of its own stream."""
    fast = compiled(wave, "cuda")
    streams = [torch.cuda.Stream() for _ in range(3)]
    results = []
    for i in range(24):
        with torch.cuda.stream(streams[i % 3]):
            x = torch.full((1 << 16,), float(i), device="cuda")
            for _ in range(20):
                x = x + 1  # work that the copy-in must wait for
            y = fast(x)
            results.append((y, wave(x)))
        if i % 5 == 0:
            results = results[-2:]
    torch.cuda.synchronize()
    for got, expected in results:
        assert_same(got, expected)


def test_output_dropped_while_another_stream_still_reads_it() -> None:
    fast = compiled(wave, "cuda")
    one, other = torch.cuda.Stream(), torch.cuda.Stream()
    inputs = inputs_of("cuda", 1 << 14, calls=4)
    expected = wave(inputs[1])
    torch.cuda.synchronize()
    with torch.cuda.stream(one):
        for _ in range(3):
            fast(inputs[0])
        y = fast(inputs[1])
    with torch.cuda.stream(other):
        held = fast(inputs[2])  # ordered behind the replay above, on an instance of its own
    with torch.cuda.stream(one):
        torch.cuda._sleep(200_000_000)  # type: ignore[no-untyped-call]
        got = y.clone()
        del y
    with torch.cuda.stream(other):
        again = fast(inputs[3])
    torch.cuda.synchronize()
    assert_same(got, expected)
    assert_same(held, wave(inputs[2]))
    assert_same(again, wave(inputs[3]))


def test_sign_of_a_cpu_zero() -> None:
    def divide(x: Tensor, by: Tensor) -> Tensor:
        return x / by

    fast = compiled(divide, "cuda")
    for value in (0.0, 0.0, -0.0, -0.0, 0.0):
        x, by = torch.ones(8, device="cuda"), torch.tensor(value)
        assert_same(fast(x, by), divide(x, by))


def test_reserved_memory_is_flat_over_200_rounds() -> None:
    def measure() -> int:
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved()

    def build() -> Any:
        return nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256)).cuda()

    reserved = []
    for number in range(200):
        model = build()
        fast = compiled(model, "cuda")
        with torch.no_grad():
            for x in inputs_of("cuda", 64, 256, calls=3):
                y = fast(x)
        if number % 50 == 0:
            assert_same(y, model(x), rtol=1e-3, atol=1e-4)
            assert parts(fast)[0].num_replays == 2
        del model, fast, x, y
        torch._dynamo.reset()
        if number % 20 == 19:
            reserved.append(measure())
    assert max(reserved[1:]) <= reserved[0]


def test_outputs_of_more_memory_than_inputs_are_given_back_by_del() -> None:
    def grow(x: Tensor) -> Tensor:
        return x.repeat(1 << 10, 1) * 2

    fast = compiled(grow, "cuda")
    before = torch.cuda.memory_allocated()
    for x in inputs_of("cuda", 16, 256):
        fast(x)
    del fast, x
    torch._dynamo.reset()
    gc.collect()
    assert torch.cuda.memory_allocated() <= before + 16 * 256 * 4 * 6


def test_results_are_right_when_the_caching_allocator_is_under_way() -> None:
    """Eager work allocates and frees between calls: it never gets memory that a graph writes to."""
    fast = compiled(wave, "cuda")
    bystanders: list[tuple[Tensor, float]] = []
    for i, x in enumerate(inputs_of("cuda", 512, calls=30)):
        y = fast(x)
        bystanders.append((torch.full((512,), float(i), device="cuda"), float(i)))
        assert_same(y, wave(x))
        del y
        for tensor, value in bystanders:
            assert tensor.eq(value).all()
        if i % 7 == 6:
            bystanders.clear()
    assert_captured(fast)


def test_current_device_and_stream_are_left_alone() -> None:
    fast = compiled(wave, "cuda")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for x in inputs_of("cuda", 8):
            fast(x)
            assert torch.cuda.current_stream() == stream
    assert torch.cuda.current_stream() == torch.cuda.default_stream()


def test_second_device() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    fast = compiled(wave, "cuda")
    for x in inputs_of("cuda:1", 8):
        y = fast(x)
        assert y.device.index == 1
        assert_same(y, wave(x))
        assert torch.cuda.current_device() == 0
    for part in parts(fast):
        assert part.state == "captured"


def test_weights_that_are_replaced_200_times_are_still_captured() -> None:
    model = nn.Linear(64, 64).cuda()
    fast, x = compiled(model, "cuda"), torch.randn(8, 64, device="cuda")
    with torch.no_grad():
        for _ in range(200):
            model.load_state_dict({name: value + 0.01 for name, value in model.state_dict().items()}, assign=True)
            for _ in range(3):
                assert_same(fast(x), model(x), rtol=1e-3, atol=1e-3)
    (part,) = parts(fast)
    assert set(part.fallbacks) == {"warm_up"}
    assert len(part.graphs) <= 4


def test_parameters_that_become_slices_of_one_vector() -> None:
    """Code made for aligned parameters gets them at addresses that are not."""
    net = nn.Sequential(nn.Linear(7, 7), nn.Linear(7, 64)).cuda()
    fast, x = compiled(net, "cuda"), torch.randn(5, 7, device="cuda")
    with torch.no_grad():
        for _ in range(3):
            assert_same(fast(x), net(x), rtol=1e-3, atol=1e-3)
        for _ in range(2):
            vector = torch.randn(sum(p.numel() for p in net.parameters()), device="cuda")
            nn.utils.vector_to_parameters(vector, net.parameters())
            assert any(parameter.data_ptr() % 16 for parameter in net.parameters())
            for _ in range(4):
                assert_same(fast(x), net(x), rtol=1e-3, atol=1e-3)
        torch.cuda.synchronize()


def test_first_called_inside_a_capture_by_hand() -> None:
    fast, x = compiled(wave, "cuda"), torch.randn(8, device="cuda")
    for _ in range(2):
        with pytest.raises(NotWarmedUpError), graph(torch.cuda.CUDAGraph()):
            fast(x)
    for _ in range(4):
        assert_same(fast(x), wave(x))
    assert_captured(fast)


def test_a_stream_that_is_captured_is_not_waited_for() -> None:
    """Results were used on a stream that somebody captures now: the capture goes on, and the call is right."""
    fast, x = compiled(wave, "cuda"), torch.randn(8, device="cuda")
    side, other = torch.cuda.Stream(), torch.cuda.Stream()
    with torch.no_grad():
        for stream in (side, other, side, side):
            with torch.cuda.stream(stream):
                for _ in range(3):
                    assert_same(fast(x), wave(x))
        torch.cuda.synchronize()
        y, answers = torch.zeros(4, device="cuda"), []

        def call() -> None:
            with torch.no_grad(), torch.cuda.stream(other):
                answers.append(fast(x))

        g = torch.cuda.CUDAGraph()
        with graph(g, stream=side, capture_error_mode="thread_local"):
            y.add_(1)
            thread = threading.Thread(target=call)
            thread.start()
            thread.join()
            y.add_(1)
        g.replay()
        torch.cuda.synchronize()
    assert y.tolist() == [2.0] * 4
    assert_same(answers, [wave(x)])


@torch.library.custom_op("graphcap_tests::scaled_by_its_sum", mutates_args=())
def scaled_by_its_sum(x: Tensor) -> Tensor:
    """Waits for the GPU, where nobody sees it until it is captured."""
    return x * float(x.sum())


scaled_by_its_sum.register_fake(torch.empty_like)


def test_captures_that_fail_keep_no_memory() -> None:
    def call_and_drop(number: int) -> None:
        torch._dynamo.reset()  # or the number becomes a symbol

        def function(x: Tensor) -> Tensor:
            return scaled_by_its_sum(torch.sin(x) + number) * 2

        fast = compiled(function, "cuda")
        for x in inputs_of("cuda", 1 << 20, calls=4):
            assert_same(fast(x), function(x), rtol=1e-3, atol=1e-2)
        (part,) = parts(fast)
        assert (part.state, [reason.kind for reason in part.reasons]) == ("refused", ["capture_failed"])

    def reserved() -> int:
        torch._dynamo.reset()
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved()

    with torch.no_grad():
        for number in range(2):
            call_and_drop(number)
        before = reserved()
        for number in range(20):
            call_and_drop(2 + number)
        assert reserved() <= before
        fast = compiled(wave, "cuda")
        for x in inputs_of("cuda", 8, calls=4):
            assert_same(fast(x), wave(x))
        assert_captured(fast)
