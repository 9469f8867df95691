"""Scenarios: threads, other compilers at work, memory given back, first calls inside a capture."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from helpers.backend_calls import assert_captured, assert_same, compiled, eager_and_compiled, inputs_of, parts
from torch import Tensor, nn

from graphcap_backend import HostGraph, graph, report
from graphcap_backend.backend import Region

THREADS = 32


def wave(x: Tensor) -> Tensor:
    return (x * 2 + 1) * x.flip(0)


def _at_once(work: Callable[[int], Any], count: int = THREADS) -> list[Any]:
    """Results of ``work(0) ... work(count - 1)``, all begun together, each on its thread."""
    barrier = threading.Barrier(count)

    def run(i: int) -> Any:
        barrier.wait(60)
        return work(i)

    with ThreadPoolExecutor(count) as pool:
        return [future.result(120) for future in [pool.submit(run, i) for i in range(count)]]


def check_threads_with_different_inputs(device: str) -> None:
    fast = compiled(wave, device)

    def work(i: int) -> int:
        held = []
        for call in range(12):
            x = torch.full((4,), float(i * 100 + call), device=device)
            y = fast(x)
            held.append((y, wave(x)))
            for got, expected in held[-3:]:
                assert_same(got, expected)
        for got, expected in held:
            assert_same(got, expected)
        return i

    assert _at_once(work) == list(range(THREADS))  # the first calls compile, at once too
    assert sum(part.num_replays for part in parts(fast)) > 0


def check_threads_that_train(device: str) -> None:
    pairs = [eager_and_compiled(nn.Sequential(nn.Linear(3, 4), nn.Tanh()), device) for _ in range(4)]

    def work(i: int) -> None:
        model, fast = pairs[i]
        generator = torch.Generator().manual_seed(i)
        for _ in range(8):
            x = torch.randn(5, 3, generator=generator).to(device)
            for m in (model, fast):
                m.zero_grad()
                m(x).square().sum().backward()
            assert_same([p.grad for p in fast.parameters()], [p.grad for p in model.parameters()])

    _at_once(work, 4)


def check_another_backend_compiles_meanwhile(device: str) -> None:
    def work(i: int) -> None:
        def function(x: Tensor) -> Tensor:
            return (x + i).sin() * (i + 1)

        mine = i % 2 == 0
        fast: Any = compiled(function, device) if mine else torch.compile(function)
        for x in inputs_of(device, 4, calls=5):
            assert_same(fast(x), function(x))
        if mine:
            assert_captured(fast)

    regions = len(list(Region.all_live))
    # One flag of torch's says for all threads that FX is tracing, as it does somewhere in a compile.
    with torch._dynamo.config.patch(error_on_nested_fx_trace=False):
        _at_once(work, 6)
    gc.collect()
    assert len(list(Region.all_live)) <= regions + 3  # none came from the other backend


def check_backward_on_another_thread(device: str) -> None:
    model, fast = eager_and_compiled(nn.Sequential(nn.Linear(3, 4), nn.Tanh()), device)
    for x in inputs_of(device, 5, 3):
        losses = []
        for m in (model, fast):
            m.zero_grad()
            losses.append(m(x).square().sum())
        threads = [threading.Thread(target=loss.backward) for loss in losses]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert_same([p.grad for p in fast.parameters()], [p.grad for p in model.parameters()])
    assert_captured(fast)


def check_nested_compile(device: str) -> None:
    inner = compiled(wave, device)

    def outer(x: Tensor) -> Tensor:
        return inner(x + 1).sum(0, keepdim=True) + x

    fast = compiled(outer, device)
    for x in inputs_of(device, 4):
        assert_same(fast(x), wave(x + 1).sum(0, keepdim=True) + x)
        assert_same(inner(x), wave(x))
    assert_captured(fast)


def check_memory_comes_back(device: str) -> None:
    for way in ("delete", "reset"):
        others = set(Region.all_live)  # Dynamo keeps the first half of a function with a graph break for good
        model, fast = eager_and_compiled(nn.Sequential(nn.Linear(3, 4), nn.Tanh()), device)
        for x in inputs_of(device, 5, 3):
            fast(x).sum().backward()
        graphs = [weakref.ref(g) for g in report(fast).graphs]
        weight = weakref.ref(fast._orig_mod[0].weight)
        regions = [weakref.ref(r) for r in set(Region.all_live) - others]
        del others
        assert graphs
        assert regions
        del x
        if way == "delete":
            del fast, model
            torch._dynamo.reset_code_caches()
        else:
            torch._dynamo.reset()
        gc.collect()
        assert [r() for r in regions] == [None] * len(regions), way
        assert [g() for g in graphs] == [None] * len(graphs), way
        if way == "delete":
            assert weight() is None


def check_functions_built_and_dropped_in_a_loop(device: str) -> None:
    counts = []
    num_others = len(Region.all_live)
    for _ in range(6):
        model = nn.Sequential(nn.Linear(3, 4), nn.Tanh()).to(device)
        fast = compiled(model, device)
        for x in inputs_of(device, 5, 3, calls=4):
            fast(x).sum().backward()
        del model, fast, x
        torch._dynamo.reset()
        gc.collect()
        counts.append((len(list(Region.all_live)), sum(type(o) in (Tensor, nn.Parameter) for o in gc.get_objects())))
    assert counts[-1][0] <= num_others
    assert counts[-1][1] <= counts[1][1]


def check_calls_go_on_after_a_reset(device: str) -> None:
    fast = compiled(wave, device)
    for _ in range(3):
        for x in inputs_of(device, 4, calls=4):
            assert_same(fast(x), wave(x))
        assert_captured(fast)
        torch._dynamo.reset()


def check_called_inside_a_capture_of_the_user(device: str) -> None:
    fast = compiled(wave, device)
    x = torch.ones(4, device=device)
    for _ in range(3):
        fast(x)
    mine = HostGraph() if device == "cpu" else torch.cuda.CUDAGraph()
    with graph(mine):
        y = fast(x)
    for i in range(3):
        x.fill_(i)
        mine.replay()
        assert_same(y, wave(x))
        assert_same(fast(x + 1), wave(x + 1))
    assert parts(fast)[0].fallbacks["already_capturing"] == 1


def check_generator_state_is_left_alone(device: str) -> None:
    """A function without random numbers draws none, captured or not."""
    fast = compiled(wave, device)
    torch.manual_seed(2)
    expected = torch.rand(3, device=device)
    torch.manual_seed(2)
    for x in [torch.ones(4, device=device)] * 4:
        fast(x)
    assert_same(torch.rand(3, device=device), expected)


def check_garbage_collection_and_default_modes_are_restored(device: str) -> None:
    fast = compiled(wave, device)
    for enabled in (False, True):
        (gc.enable if enabled else gc.disable)()
        try:
            for x in inputs_of(device, 4 + enabled, calls=4):
                fast(x)
                assert gc.isenabled() == enabled
                assert torch.is_grad_enabled()
                assert not torch.is_inference_mode_enabled()
        finally:
            gc.enable()


def check_graphs_of_the_report_that_the_user_resets(device: str) -> None:
    fast = compiled(wave, device)
    inputs = inputs_of(device, 4, calls=5)
    held = [fast(x) for x in inputs]
    before = report(fast).graphs
    assert len(before) == 3  # two that take turns, and one that copies
    replays = parts(fast)[0].num_replays
    before[0].reset()
    assert report(fast).graphs == ()
    for x in inputs:
        assert_same(fast(x), wave(x))
    before[1].reset()  # nothing any more
    assert_captured(fast, replays=replays + len(inputs))
    assert not {id(g) for g in report(fast).graphs} & {id(g) for g in before}
    assert_same(held, [wave(x) for x in inputs])


def check_resets_do_not_count_as_shapes(device: str) -> None:
    fast = compiled(wave, device, max_graphs=1)
    for x in inputs_of(device, 4, calls=5):
        assert_same(fast(x), wave(x))
        for g in report(fast).graphs:
            g.reset()
    assert parts(fast)[0].num_replays == 4
    assert parts(fast)[0].fallbacks == {"warm_up": 1}


def check_graphs_reset_between_forward_and_backward(device: str) -> None:
    model, fast = eager_and_compiled(nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)), device)
    for i, x in enumerate(inputs_of(device, 4, 3, calls=8)):
        model.zero_grad()
        fast.zero_grad()
        model(x).square().sum().backward()
        y = fast(x)
        if i in (3, 5):
            for g in report(fast).graphs:
                g.reset()
        y.square().sum().backward()
        assert_same([p.grad for p in fast.parameters()], [p.grad for p in model.parameters()])
    assert_captured(fast)


def check_a_graph_reset_by_another_thread(device: str) -> None:
    fast = compiled(wave, device)
    inputs = inputs_of(device, 4, calls=100)
    done = threading.Event()

    def reset_all() -> None:
        while not done.is_set():
            for g in report(fast).graphs:
                g.reset()

    fast(inputs[0])
    with ThreadPoolExecutor(1) as pool:
        resetting = pool.submit(reset_all)
        try:
            for x in inputs:
                assert_same(fast(x), wave(x))
        finally:
            done.set()
        resetting.result()


def check_a_call_that_waits_for_another_thread(device: str) -> None:
    """Code that runs uncaptured may wait for a call that another thread makes."""
    inner = compiled(lambda x: x.sin() + 1, device)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(inner, torch.randn(4, device=device)).result(60)

        def through_a_thread(x: Tensor) -> Tensor:
            return pool.submit(inner, x.detach().clone()).result(60).detach().clone()

        name = f"graphcap_tests::through_a_thread_{device}"
        operator = torch.library.custom_op(name, through_a_thread, mutates_args=())
        operator.register_fake(torch.empty_like)
        outer = compiled(lambda x: operator(x.cos()) * 2, device)
        x = torch.randn(4, device=device)
        with torch.no_grad():
            assert_same(outer(x), (x.cos().sin() + 1) * 2)
