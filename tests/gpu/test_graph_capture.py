"""``graph`` on CUDA: streams, pools, modes, keep_graph, random numbers, threads."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from typing import Any

import pytest
import torch
from helpers.cuda_state import need_cuda, reserved
from helpers.tables import table_sizes

from graphcap_backend import (
    CaptureError,
    GraphcapError,
    NestedCaptureError,
    capture_nodes,
    get_kernel_annotations,
    get_kernel_py_stacks,
    graph,
    graph_pool_handle,
    mark_kernels,
)
from graphcap_backend.capture import driver
from graphcap_backend.capture.process import PROCESS, SideStreams
from graphcap_backend.capture.record import captured_graph

_STACKS = {"record_py_stacks": True}


@pytest.fixture(autouse=True)
def _device() -> None:
    need_cuda()


def _free_of_recording() -> None:
    """Skip where somebody else holds CUPTI (a profiler ran earlier in this process)."""
    from graphcap_backend import CuptiError
    from graphcap_backend.annotate import cupti

    try:
        cupti.acquire_callbacks()
    except CuptiError as error:
        pytest.skip(f"needs CUPTI: {error}")
    cupti.release_callbacks()


# Streams and pools


def test_side_stream_is_ours_and_the_same_each_time() -> None:
    outside = torch.cuda.current_stream()
    seen = []
    for _ in range(2):
        with graph(torch.cuda.CUDAGraph()):
            torch.ones(4, device="cuda").add_(1)
            seen.append(torch.cuda.current_stream().cuda_stream)
    assert seen[0] == seen[1] != outside.cuda_stream
    assert torch.cuda.current_stream() == outside


def test_given_stream_is_used() -> None:
    stream = torch.cuda.Stream()
    with graph(torch.cuda.CUDAGraph(), stream=stream):
        assert torch.cuda.current_stream() == stream
        torch.ones(4, device="cuda").add_(1)


def test_default_stream_is_refused_before_torch_meets_it() -> None:
    with pytest.raises(ValueError, match="default stream"):
        graph(torch.cuda.CUDAGraph(), stream=torch.cuda.default_stream())


@pytest.mark.parametrize("kind", ["handle", "pool()", "MemPool"])
def test_pools_are_shared(kind: str) -> None:
    x = torch.ones(1 << 20, device="cuda")
    first, second = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    pool: Any = {"handle": graph_pool_handle, "MemPool": torch.cuda.MemPool, "pool()": lambda: None}[kind]()
    with graph(first, pool=pool):
        y = x + 1
    address = y.data_ptr()
    del y
    with graph(second, pool=first.pool() if kind == "pool()" else pool):
        z = x + 2
    assert z.data_ptr() == address  # dead memory of the first, on the same side stream
    assert tuple(first.pool()) == tuple(second.pool())
    second.replay()
    assert z[0].item() == 3


def test_mem_pool_lives_as_long_as_its_graph() -> None:
    g, pool = torch.cuda.CUDAGraph(), torch.cuda.MemPool()
    x = torch.ones(1 << 20, device="cuda")
    with graph(g, pool=pool):
        y = x + 1
    del pool
    gc.collect()
    g.replay()
    assert y[0].item() == 2


def test_two_devices() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    x = torch.ones(4, device="cuda:1")
    g = torch.cuda.CUDAGraph()
    with torch.cuda.device(1), graph(g):
        y = x + 1
    assert torch.cuda.current_device() == 0
    g.replay()
    torch.cuda.synchronize(1)
    assert y.tolist() == [2.0] * 4


def test_stream_of_another_device_selects_that_device() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    g = torch.cuda.CUDAGraph()
    with graph(g, stream=torch.cuda.Stream(1)):
        y = torch.full((4,), 3.0, device="cuda")
    assert y.device.index == 1
    assert torch.cuda.current_device() == 0


# keep_graph, instantiate, reset


@pytest.mark.parametrize("keep", [False, True])
def test_node_list_and_replay(keep: bool) -> None:
    x = torch.ones(8, device="cuda")
    g = torch.cuda.CUDAGraph(keep_graph=keep)
    with graph(g):
        y = (x + 1) * 3
    for value in (1.0, 5.0):
        x.fill_(value)
        g.replay()
        assert y.tolist() == [(value + 1) * 3] * 8
    nodes = capture_nodes(g)
    assert [node.index for node in nodes] == [0, 1]
    assert nodes[1].dependencies == (0,)
    assert capture_nodes(g) == nodes


def test_deferred_and_repeated_instantiate_move_the_keys() -> None:
    _free_of_recording()
    x = torch.ones(8, device="cuda")
    g = torch.cuda.CUDAGraph(keep_graph=True)
    with graph(g, enable_annotations=True, annotation_config=_STACKS), mark_kernels("a"):
        y = (x + 1) * 3
    captured = captured_graph(g)
    assert captured is not None
    assert captured.keys.exec_graph_id() is None
    assert {key >> 32 for key in get_kernel_annotations()} == {captured.keys.source_graph_id}
    seen = []
    for _ in range(3):
        g.instantiate()
        seen.append(captured.keys.exec_graph_id())
        assert {key >> 32 for key in get_kernel_annotations()} == {seen[-1]}
        g.replay()
        assert y.tolist() == [6.0] * 8
        assert [node.annotation for node in capture_nodes(g)] == [{"name": "a"}] * 2
    assert len(set(seen)) == 3


def test_source_graph_id_is_the_one_cupti_gives() -> None:
    _free_of_recording()
    from graphcap_backend.annotate import cupti

    g = torch.cuda.CUDAGraph(keep_graph=True)
    with graph(g):
        torch.ones(4, device="cuda").add_(1)
    captured = captured_graph(g)
    assert captured is not None
    cupti.acquire_callbacks()
    try:
        assert cupti.graph_id(g.raw_cuda_graph()) == captured.keys.source_graph_id
    finally:
        cupti.release_callbacks()


def test_ids_are_asked_for_once_an_executable_graph() -> None:
    """On a driver before 13.1 CUPTI is asked, which takes milliseconds."""
    _free_of_recording()
    x = torch.ones(8, device="cuda")
    graphs = [torch.cuda.CUDAGraph(keep_graph=True) for _ in range(20)]
    for number, g in enumerate(graphs):
        with graph(g, enable_annotations=True, annotation_config=_STACKS), mark_kernels(str(number)):
            x.add_(1)
        g.instantiate()
    view = get_kernel_annotations()
    for round_ in range(2):  # the second after new instantiations, at addresses that the first may have had
        keys = list(view)
        start = time.perf_counter()
        for _ in range(5):
            assert {view[key][0].get("name") for key in keys} >= {str(number) for number in range(20)}
        assert time.perf_counter() - start < 0.1, round_
        captured = [captured_graph(g) for g in graphs]
        before = [each.keys.exec_graph_id() for each in captured if each is not None]
        for g in graphs:
            g.instantiate()
        after = [each.keys.exec_graph_id() for each in captured if each is not None]
        assert len({*before, *after}) == 40
        if driver.graph_exec_id(graphs[0].raw_cuda_graph_exec()) is None:
            from graphcap_backend.annotate import cupti

            assert after == [cupti.graph_exec_id(g.raw_cuda_graph_exec()) for g in graphs]
        assert {key >> 32 for key in view}.isdisjoint(before)


@pytest.mark.parametrize("keep", [False, True])
def test_capture_by_torch_into_the_same_pool_is_not_taken_for_ours(keep: bool) -> None:
    x = torch.ones(4, device="cuda")
    pool = graph_pool_handle()
    g = torch.cuda.CUDAGraph(keep_graph=keep)
    for _ in range(3):
        with graph(g, pool=pool):
            x + 1
        g.reset()
        with torch.cuda.graph(g, pool=pool):
            x + 1
            x + 2
        with pytest.raises(GraphcapError, match="captured by"):
            capture_nodes(g)
        g.reset()


@pytest.mark.parametrize("keep", [False, True])
def test_reset_and_recapture_on_the_same_object(keep: bool) -> None:
    before = table_sizes()
    _free_of_recording()
    x = torch.ones(8, device="cuda")
    g = torch.cuda.CUDAGraph(keep_graph=keep)
    old = None
    for count in (1, 3, 2):
        with graph(g, enable_annotations=True, annotation_config=_STACKS), mark_kernels(f"{count}"):
            y = x.clone()
            for _ in range(count):
                y.add_(1)
        g.replay()
        assert y.tolist() == [1.0 + count] * 8
        nodes = capture_nodes(g)
        assert [node.annotation for node in nodes] == [{"name": f"{count}"}] * (count + 1)
        assert all(node.stack is not None and "test_reset_and_recapture" in node.stack for node in nodes)
        assert len(get_kernel_annotations()) == before.annotations + count + 1
        old, captured = captured_graph(g), old
        assert captured is None or not captured.keys.alive()
        g.reset()
        assert len(get_kernel_annotations()) == before.annotations
        assert len(get_kernel_py_stacks()) == before.stacks
        with pytest.raises(GraphcapError, match="reset"):
            capture_nodes(g)


@pytest.mark.parametrize("keep", [False, True])
def test_captured_graph_is_not_captured_over(keep: bool) -> None:
    x = torch.ones(4, device="cuda")
    g = torch.cuda.CUDAGraph(keep_graph=keep)
    with graph(g):
        y = x + 1
    with pytest.raises(CaptureError, match=r"reset\(\)"), graph(g):
        pytest.fail("the block must not run")
    g.replay()
    assert y.tolist() == [2.0] * 4
    assert len(capture_nodes(g)) == 1


def test_capture_by_torch_is_not_taken_for_ours() -> None:
    x = torch.ones(4, device="cuda")
    g = torch.cuda.CUDAGraph()
    with graph(g):
        x + 1
    g.reset()
    with torch.cuda.graph(g):
        x + 1
        x + 2
    with pytest.raises(GraphcapError, match="captured by"):
        capture_nodes(g)


def test_graph_deleted_while_a_replay_runs() -> None:
    before = table_sizes()
    x = torch.zeros(1 << 24, device="cuda")
    g = torch.cuda.CUDAGraph()
    with graph(g):
        for _ in range(50):
            x.add_(1)
    dead = weakref.ref(g)
    for _ in range(4):
        g.replay()
    del g
    assert dead() is None
    assert len(PROCESS.captured) == before.captured
    torch.cuda.synchronize()
    assert x.min().item() == x.max().item() == 200


def test_nothing_grows_over_a_thousand_captures() -> None:
    before = table_sizes()
    _free_of_recording()
    import resource

    x = torch.ones(64, device="cuda")

    def capture(number: int) -> None:
        g = torch.cuda.CUDAGraph(keep_graph=bool(number % 2))
        recorded = number % 10 == 0
        with graph(g, enable_annotations=recorded), mark_kernels(str(number)):
            for _ in range(20):
                x.add_(1)
        if number % 3 == 0:
            capture_nodes(g)

    for number in range(100):
        capture(number)
    device, host = reserved(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for number in range(1000):
        capture(number)
    assert reserved() == device
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - host < 32 * 1024  # KiB
    assert len(PROCESS.captured) == before.captured
    assert len(get_kernel_annotations()) == before.annotations


def test_plain_capture_leaves_replays_as_fast() -> None:
    """No CUPTI for who records nothing: merely asking it for an id makes every replay slower."""
    x = torch.ones(64, device="cuda")
    g = torch.cuda.CUDAGraph()
    with torch.cuda.graph(g):
        for _ in range(50):
            x.add_(1)

    def replay_us() -> float:
        times = []
        for _ in range(200):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(10):
                g.replay()
            times.append((time.perf_counter() - start) / 10 * 1e6)
        return sorted(times)[len(times) // 4]

    replay_us()
    before = replay_us()
    other = torch.cuda.CUDAGraph()
    with graph(other):
        x.add_(1)
    capture_nodes(other)
    assert captured_graph(other) is not None
    assert replay_us() < before * 1.3 + 1


# Random numbers


def test_dropout_masks_differ_and_repeat_after_reseeding() -> None:
    x = torch.ones(4096, device="cuda")
    torch.cuda.manual_seed(7)
    g = torch.cuda.CUDAGraph()
    with graph(g):
        y = torch.nn.functional.dropout(x, 0.5)

    def sequence() -> list[torch.Tensor]:
        torch.cuda.manual_seed(11)
        masks = []
        for _ in range(3):
            g.replay()
            masks.append(y.clone())
            masks.append(torch.nn.functional.dropout(x, 0.5))  # an eager draw in between
        return masks

    first, second = sequence(), sequence()
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)
    for i, a in enumerate(first):
        assert all(not torch.equal(a, b) for b in first[i + 1 :])


# Error modes and threads


def _worker_pins_and_copies(start: threading.Event, done: threading.Event, problems: list[BaseException]) -> None:
    start.wait(60)
    try:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            # More than was ever pinned, so that the driver has to be asked.
            host = torch.empty(1 << 26, dtype=torch.uint8, pin_memory=True).fill_(3)
            device = host.to("cuda", non_blocking=True)
            assert device[0].item() == 3
    except BaseException as error:  # noqa: BLE001  told to the main thread
        problems.append(error)
    finally:
        done.set()


@pytest.mark.parametrize("mode", ["global", "thread_local", "relaxed"])
def test_worker_thread_in_each_error_mode(mode: str) -> None:
    start, done = threading.Event(), threading.Event()
    problems: list[BaseException] = []
    worker = threading.Thread(target=_worker_pins_and_copies, args=(start, done, problems))
    worker.start()
    x = torch.ones(4, device="cuda")
    g = torch.cuda.CUDAGraph()
    error: BaseException | None = None
    try:
        with graph(g, capture_error_mode=mode):
            y = x + 1
            start.set()
            assert done.wait(60)
            y = y + 1
    except Exception as caught:  # noqa: BLE001  judged below
        error = caught
    worker.join()
    if mode == "global":
        # The worker's call was refused, and the capture says why it died, in its own text or in a note.
        assert len(problems) == 1
        assert error is not None
        text = str(error) + "".join(getattr(error, "__notes__", []))
        assert "global" in text
        assert "thread_local" in text
    else:
        assert problems == []
        assert error is None
        g.replay()
        assert y.tolist() == [3.0] * 4
    with graph(torch.cuda.CUDAGraph()):
        x + 1


def test_concurrent_captures_on_default_side_streams() -> None:
    barrier = threading.Barrier(3, timeout=60)
    problems: list[BaseException] = []

    def work(number: int) -> None:
        x = torch.full((64,), float(number), device="cuda")
        g = torch.cuda.CUDAGraph(keep_graph=number == 1)
        try:
            torch.cuda.current_stream().synchronize()
            for _ in range(3):
                barrier.wait()
                with graph(g, capture_error_mode="thread_local"):
                    y = x * 2
                    barrier.wait()
                    for _ in range(number):
                        y = y + 1
                    barrier.wait()
                barrier.wait()
                g.replay()
                torch.cuda.current_stream().synchronize()
                assert y.tolist() == [3.0 * number] * 64
                assert len(capture_nodes(g)) == number + 1
                g.reset()
        except BaseException as error:  # noqa: BLE001  told to the main thread
            problems.append(error)
            barrier.abort()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if problems:
        raise problems[0]
    assert gc.isenabled()


def test_concurrent_captures_record_their_own_scopes() -> None:
    _free_of_recording()
    barrier = threading.Barrier(2, timeout=60)
    problems: list[BaseException] = []

    def work(number: int) -> None:
        x = torch.full((64,), float(number), device="cuda")
        g = torch.cuda.CUDAGraph()
        try:
            torch.cuda.current_stream().synchronize()
            barrier.wait()
            with graph(g, None, None, "thread_local", True, _STACKS), mark_kernels(f"t{number}"):
                for _ in range(20):
                    x.add_(1)
                    barrier.wait()
            nodes = capture_nodes(g)
            assert [node.annotation for node in nodes] == [{"name": f"t{number}"}] * 20
            assert all(node.stack is not None and ":work" in node.stack for node in nodes)
        except BaseException as error:  # noqa: BLE001  told to the main thread
            problems.append(error)
            barrier.abort()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if problems:
        raise problems[0]


def test_nested_captures_are_refused_and_the_outer_one_goes_on() -> None:
    x = torch.ones(4, device="cuda")
    outer, inner = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    with graph(outer):
        y = x + 1
        with pytest.raises(NestedCaptureError), graph(inner):
            pytest.fail("the block must not run")
        y = y + 1
    outer.replay()
    assert y.tolist() == [3.0] * 4
    del inner  # torch's own nested begin would end the process here


def test_capture_inside_torchs_own_is_refused() -> None:
    x = torch.ones(4, device="cuda")
    outer, inner = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(outer):
        y = x + 1
        with pytest.raises(NestedCaptureError), graph(inner):
            pytest.fail("the block must not run")
        y = y + 1
    outer.replay()
    assert y.tolist() == [3.0] * 4
    del inner


def test_busy_stream_is_refused() -> None:
    stream = torch.cuda.Stream()
    driver.begin_empty_capture(stream.cuda_stream)
    try:
        with pytest.raises(CaptureError, match="already capturing"), graph(torch.cuda.CUDAGraph(), stream=stream):
            pytest.fail("the block must not run")
    finally:
        driver.drop_capture(stream.cuda_stream)


@pytest.mark.parametrize("mode", ["global", "thread_local", "relaxed"])
@pytest.mark.parametrize("captured_by", [graph, torch.cuda.graph])
def test_old_graph_in_a_cycle_and_a_collection_inside(captured_by: Any, mode: str) -> None:
    class Holder:
        pass

    x = torch.ones(4, device="cuda")
    holder: Any = Holder()
    holder.me, holder.graph = holder, torch.cuda.CUDAGraph()
    with captured_by(holder.graph):
        x + 1
    dead = weakref.ref(holder.graph)
    del holder
    g = torch.cuda.CUDAGraph()
    with graph(g, capture_error_mode=mode):
        y = x + 1
        gc.collect()
        y = y + 1
    g.replay()
    assert y.tolist() == [3.0] * 4
    gc.collect()
    assert dead() is None


@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream:UserWarning")  # torch's own hint
def test_warmed_up_on_a_side_stream_captured_on_another() -> None:
    model = torch.nn.Linear(16, 16, device="cuda")
    x = torch.randn(8, 16, device="cuda")
    expected = torch.autograd.grad(model(x).square().sum(), tuple(model.parameters()))
    warm = torch.cuda.Stream()
    warm.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(warm):
        for _ in range(2):
            loss = model(x).square().sum()  # kept alive over the capture
            loss.backward()
    torch.cuda.current_stream().wait_stream(warm)
    for parameter in model.parameters():
        parameter.grad = None
    g = torch.cuda.CUDAGraph()
    with graph(g, stream=torch.cuda.Stream()):
        second = model(x).square().sum()
        second.backward()
    g.replay()
    torch.cuda.synchronize()
    for parameter, grad in zip(model.parameters(), expected, strict=True):
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad, grad)
    assert loss.isfinite().item()


def test_profiles_round_replays_of_an_older_graph() -> None:
    """In a process of its own: a profiler holds CUPTI for good."""
    import subprocess
    import sys

    program = """
import torch
from torch.profiler import ProfilerActivity, profile
from graphcap_backend import graph, capture_nodes
x = torch.ones(64, device="cuda")
g, h = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
with graph(g):
    y = x + 1
for session in range(2):
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as prof:
        g.replay()
        if session == 0:
            with graph(h):
                z = x * 3
        h.replay()
        torch.cuda.synchronize()
    names = [event.name for event in prof.events() if event.device_type.name == "CUDA"]
    assert sum("elementwise" in name for name in names) >= 2, names
assert y[0].item() == 2 and z[0].item() == 3
assert len(capture_nodes(g)) == len(capture_nodes(h)) == 1
print("fine")
"""
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=False)
    assert answer.stdout.endswith("fine\n"), answer.stderr[-3000:]


def test_captures_that_overlapped_leave_the_first_stream_in_use() -> None:
    """Memory of a shared pool serves the stream that it was allocated on."""
    streams = SideStreams()
    first, second = streams.take(0), streams.take(0)
    streams.give_back(first)
    streams.give_back(second)
    assert streams.take(0) == first
    assert streams.take(0) == second
    assert first != second
