"""What a capture leaves behind: node lists and entries that are right, and die with their graph."""

from __future__ import annotations

import gc
import threading
import tracemalloc
import weakref

import pytest
import torch
from helpers.tables import table_sizes

from graphcap_backend import (
    CaptureError,
    GraphcapError,
    HostGraph,
    capture_nodes,
    get_kernel_annotations,
    get_kernel_py_stacks,
    graph,
    mark_kernels,
)
from graphcap_backend.capture.process import PROCESS
from graphcap_backend.capture.record import captured_graph
from graphcap_backend.capture.session import CaptureSession, SessionState

_STACKS = {"record_py_stacks": True}


@pytest.fixture(autouse=True)
def _nothing_left_of_other_tests() -> None:
    gc.collect()  # graphs in cycles with the tracebacks of errors that were expected


def _capture(g: HostGraph, label: str, times: int = 1) -> None:
    x = torch.ones(2)
    with graph(g, enable_annotations=True, annotation_config=_STACKS), mark_kernels(label):
        for _ in range(times):
            x.add_(1)


def test_session_tells_its_state() -> None:
    session = CaptureSession(HostGraph())
    assert session.state is SessionState.NEW
    with pytest.raises(CaptureError, match="is new, expected captured"):
        _ = session.captured
    with session:
        assert session.state is SessionState.CAPTURING
        torch.ones(2).add_(1)
    assert session.state is SessionState.CAPTURED
    assert session.captured.num_nodes == len(session.captured.nodes()) > 0
    assert session.captured.way is None
    with pytest.raises(CaptureError, match="runs once"):
        session.__enter__()
    assert session.state is SessionState.CAPTURED


def test_graph_block_may_be_entered_again_after_reset() -> None:
    g = HostGraph()
    x = torch.ones(2)
    block = graph(g)
    for factor in (2.0, 3.0):
        with block:
            y = x * factor
        g.replay()
        assert y.tolist() == [factor, factor]
        g.reset()


def test_reset_ends_the_record() -> None:
    before = table_sizes()
    g = HostGraph()
    _capture(g, "a")
    captured = captured_graph(g)
    assert captured is not None
    assert len(get_kernel_annotations()) == before.annotations + 1
    assert len(get_kernel_py_stacks()) == before.stacks + 1
    g.reset()
    assert captured_graph(g) is None
    assert len(get_kernel_annotations()) == before.annotations
    assert len(get_kernel_py_stacks()) == before.stacks
    with pytest.raises(GraphcapError, match="reset"):
        capture_nodes(g)
    with pytest.raises(GraphcapError, match="gone"):
        captured.nodes()


def test_recapture_replaces_the_record() -> None:
    g = HostGraph()
    _capture(g, "a")
    first = captured_graph(g)
    assert first is not None
    g.reset()
    _capture(g, "b", times=3)
    assert [node.annotation for node in capture_nodes(g)] == [{"name": "b"}] * 3
    assert not first.keys.alive()
    assert {str(value) for value in get_kernel_annotations().values()} == {"[{'name': 'b'}]"}


def test_capture_by_other_means_is_not_taken_for_ours() -> None:
    before = table_sizes()
    g = HostGraph()
    _capture(g, "a")
    g.reset()
    g.capture_begin()
    torch.ones(2).add_(1)
    g.capture_end()
    with pytest.raises(GraphcapError, match="captured by"):
        capture_nodes(g)
    assert len(get_kernel_annotations()) == before.annotations


@pytest.mark.parametrize("thing", [None, 3, HostGraph(), "g"])
def test_capture_nodes_of_something_else(thing: object) -> None:
    with pytest.raises(GraphcapError, match=type(thing).__name__):
        capture_nodes(thing)


def test_everything_dies_with_the_graph() -> None:
    before = table_sizes()
    g = HostGraph()
    _capture(g, "a")
    captured = captured_graph(g)
    assert captured is not None
    dead = [weakref.ref(g), weakref.ref(captured), weakref.ref(captured.record)]
    nodes = capture_nodes(g)
    del g, captured
    assert [ref() for ref in dead] == [None] * 3
    assert len(get_kernel_annotations()) == before.annotations
    assert len(PROCESS.captured) == before.captured
    assert nodes[0].annotation == {"name": "a"}  # a list taken before stays good


def test_repeated_instantiate_moves_the_keys() -> None:
    g = HostGraph(keep_graph=True)
    _capture(g, "a", times=2)
    captured = captured_graph(g)
    assert captured is not None
    assert captured.keys.exec_graph_id() is None
    assert {key >> 32 for key in get_kernel_annotations()} == {captured.keys.source_graph_id}
    seen = set()
    for _ in range(2):
        g.instantiate()
        exec_id = captured.keys.exec_graph_id()
        assert {key >> 32 for key in get_kernel_annotations()} == {exec_id}
        assert sorted(key & 0xFFFF_FFFF for key in get_kernel_annotations()) == [0, 1]
        seen.add(exec_id)
    assert len(seen) == 2
    assert len(capture_nodes(g)) == 2


def test_nothing_grows_over_a_thousand_captures() -> None:
    before = table_sizes()
    g = HostGraph()
    x = torch.ones(2)

    def capture(label: str) -> None:
        with graph(g, enable_annotations=True, annotation_config=_STACKS), mark_kernels(label):
            x.add_(1)
        capture_nodes(g)
        g.reset()

    tracemalloc.start()  # before the first capture: what it frees later must have been counted
    try:
        for i in range(400):
            capture(f"label {i}")
        gc.collect()
        traced = tracemalloc.get_traced_memory()[0]
        for i in range(600):
            capture(f"label {i}")
        gc.collect()
        grown = tracemalloc.get_traced_memory()[0] - traced
    finally:
        tracemalloc.stop()
    assert grown < 600 * 80  # one Python object kept per capture would be more
    assert len(get_kernel_annotations()) == before.annotations
    assert PROCESS.num_active == 0
    assert len(PROCESS.captured) <= before.captured + 1


def test_new_graphs_do_not_pile_up_either() -> None:
    before = table_sizes()
    for i in range(1000):
        _capture(HostGraph(), str(i))
    assert len(PROCESS.captured) == before.captured
    assert len(get_kernel_annotations()) == before.annotations


def test_threads_capture_at_once_each_its_own() -> None:
    barrier = threading.Barrier(4, timeout=60)
    graphs = [HostGraph() for _ in range(4)]
    problems: list[BaseException] = []

    def work(number: int) -> None:
        x = torch.full((2,), float(number))
        try:
            for _ in range(5):
                barrier.wait()
                with graph(graphs[number], None, None, "thread_local", True, _STACKS), mark_kernels(f"t{number}"):
                    barrier.wait()  # all are inside now
                    y = x * 2
                    for _ in range(number):
                        y = y + 1
                    barrier.wait()
                graphs[number].replay()
                assert y.tolist() == [number * 3.0] * 2
                nodes = capture_nodes(graphs[number])
                assert [node.annotation for node in nodes] == [{"name": f"t{number}"}] * (number + 1)
                assert all(node.stack is not None and "work" in node.stack for node in nodes)
                barrier.wait()
                graphs[number].reset()
        except BaseException as error:  # noqa: BLE001  told to the main thread
            problems.append(error)
            barrier.abort()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if problems:
        raise problems[0]
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0
    assert PROCESS.num_active == 0


def test_failure_in_one_thread_leaves_the_other_capture_alone() -> None:
    inside, failed = threading.Event(), threading.Event()
    g = HostGraph()
    x = torch.ones(2)
    results: list[list[float]] = []

    def work() -> None:
        with graph(g):
            inside.set()
            failed.wait(60)
            assert not gc.isenabled()
            y = x + 1
        g.replay()
        results.append(y.tolist())

    thread = threading.Thread(target=work)
    thread.start()
    inside.wait(60)
    with pytest.raises(CaptureError), graph(HostGraph()):
        x.sum().item()
    failed.set()
    thread.join()
    assert results == [[2.0, 2.0]]
    assert gc.isenabled()
