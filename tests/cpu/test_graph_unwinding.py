"""A capture that fails leaves nothing behind, twice in a row, and the next one works."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator

import pytest
import torch
from helpers.faulty_graphs import FAULT_POINTS, InjectedError, faulty, nothing_left_behind

from graphcap_backend import CaptureError, HostGraph, NestedCaptureError, capture_nodes, graph, mark_kernels
from graphcap_backend.annotate.recording import Recording
from graphcap_backend.capture.process import PROCESS
from graphcap_backend.capture.session import CaptureSession
from graphcap_backend.capture.undo import UndoStack

_STACKS = {"record_py_stacks": True}


def _captures_again(g: HostGraph) -> None:
    """``g`` is empty and good for a capture."""
    x = torch.full((3,), 2.0)
    with graph(g, enable_annotations=True, annotation_config=_STACKS), mark_kernels("again"):
        y = x * 3
    g.replay()
    assert y.tolist() == [6.0] * 3
    assert [node.annotation for node in capture_nodes(g)] == [{"name": "again"}]


@pytest.mark.parametrize("liveness", [False, True])
@pytest.mark.parametrize("point", FAULT_POINTS)
def test_failing_graph_methods(point: str, liveness: bool) -> None:
    g = faulty(HostGraph)()
    for _ in range(2):
        g.fail_at = point
        with nothing_left_behind():
            with (
                pytest.raises(InjectedError, match=point),
                graph(g, enable_annotations=True, annotation_config=_STACKS, check_input_liveness=liveness),
                mark_kernels("lost"),
            ):
                torch.rand(4).add_(1)
            with pytest.raises(RuntimeError):
                capture_nodes(g)
    _captures_again(g)


def _capture_and_raise(g: HostGraph, error: BaseException, liveness: bool) -> None:
    with (
        graph(g, enable_annotations=True, annotation_config=_STACKS, check_input_liveness=liveness),
        mark_kernels("lost"),
    ):
        torch.rand(4).add_(1)
        raise error


@pytest.mark.parametrize("liveness", [False, True])
@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt])
def test_exception_of_the_block_is_the_one_raised(kind: type[BaseException], liveness: bool) -> None:
    error = kind("mine")  # made here: one that lives on keeps its traceback, and so this graph
    g = HostGraph()
    for _ in range(2):
        with nothing_left_behind():
            with pytest.raises(kind) as raised:
                _capture_and_raise(g, error, liveness)
            assert raised.value is error
            assert not hasattr(error, "__notes__")
    _captures_again(g)


def test_operation_that_cannot_be_captured() -> None:
    g = HostGraph()
    x = torch.ones(3)
    for _ in range(2):
        with nothing_left_behind(), pytest.raises(CaptureError), graph(g):
            x.sum().item()
    _captures_again(g)


@pytest.mark.parametrize("step", ["stop", "seal"])
def test_failing_recording(step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = getattr(Recording, step)
    failures = iter([True, False] * 2)

    def fails_once(self: Recording, *args: object) -> object:
        result = real(self, *args)
        if next(failures, False):
            raise InjectedError(step)
        return result

    g = HostGraph()
    for _ in range(2):
        monkeypatch.setattr(Recording, step, fails_once)
        with nothing_left_behind():
            with pytest.raises(InjectedError), graph(g, enable_annotations=True), mark_kernels("lost"):
                torch.ones(3).add_(1)
        monkeypatch.setattr(Recording, step, real)
        failures = iter([True, False] * 2)
    _captures_again(g)


def test_recording_that_cannot_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(config: object) -> Recording:
        raise InjectedError("no recording")

    g = HostGraph()
    with monkeypatch.context() as patch:
        patch.setattr(Recording, "start_host", refuse)
        for _ in range(2):
            with nothing_left_behind(), pytest.raises(InjectedError), graph(g, enable_annotations=True):
                pytest.fail("the block must not run")
    _captures_again(g)


def test_undo_runs_every_step_in_reverse_and_keeps_the_first_error() -> None:
    order: list[str] = []

    def step(name: str, error: Exception | None = None) -> Iterator[None]:
        order.append(name)
        if error is not None:
            raise error
        yield

    undo = UndoStack()
    undo.restore(lambda: order.append("restore"))
    undo.on_failure(lambda: next(step("broken", OSError("cannot undo"))))
    undo.on_failure(lambda: order.append("last"))
    error = ValueError("first")
    undo.fail(error)
    assert order == ["last", "broken", "restore"]
    assert error.__notes__ == ["graphcap, while undoing the capture: OSError: cannot undo"]


def test_undo_of_a_success_runs_only_what_restores() -> None:
    order: list[str] = []
    undo = UndoStack()
    undo.restore(lambda: order.append("restore"))
    undo.on_failure(lambda: order.append("failure"))
    undo.succeed()
    undo.fail(ValueError())
    assert order == ["restore"]


# Nesting


def test_nested_capture_is_refused_and_the_outer_one_goes_on() -> None:
    outer, inner = HostGraph(), HostGraph()
    x = torch.ones(2)
    with nothing_left_behind():
        with graph(outer):
            y = x + 1
            for _ in range(2):
                with pytest.raises(NestedCaptureError, match="outer"), graph(inner):
                    pytest.fail("the block must not run")
            z = y * 2
    x.fill_(4)
    outer.replay()
    assert z.tolist() == [10.0, 10.0]
    assert len(capture_nodes(outer)) == 2
    with graph(inner):
        x + 1


def test_captured_graph_is_not_captured_over() -> None:
    g = HostGraph()
    x = torch.ones(2)
    with graph(g):
        y = x + 1
    for _ in range(2):
        with nothing_left_behind(), pytest.raises(CaptureError, match=r"reset\(\)"), graph(g):
            pytest.fail("the block must not run")
    x.fill_(7)
    g.replay()
    assert y.tolist() == [8.0, 8.0]
    assert len(capture_nodes(g)) == 1


# The garbage collector


@pytest.fixture
def collector() -> Iterator[None]:
    was_enabled = gc.isenabled()
    yield
    (gc.enable if was_enabled else gc.disable)()


@pytest.mark.usefixtures("collector")
@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("enabled", [False, True])
def test_gc_is_off_inside_and_as_before_outside(enabled: bool, fails: bool) -> None:
    (gc.enable if enabled else gc.disable)()
    try:
        with graph(HostGraph()):
            assert not gc.isenabled()
            torch.ones(2).add_(1)
            if fails:
                raise InjectedError
    except InjectedError:
        pass
    assert gc.isenabled() is enabled
    assert gc.get_freeze_count() == 0


@pytest.mark.usefixtures("collector")
def test_overlapping_captures_restore_gc_once() -> None:
    gc.enable()
    first, second = CaptureSession(HostGraph()), CaptureSession(HostGraph())
    PROCESS.garbage.hold()
    with first:
        torch.ones(2).add_(1)
    assert not gc.isenabled()
    PROCESS.garbage.release()
    assert gc.isenabled()
    with second:
        torch.ones(2).add_(1)
    assert gc.isenabled()


@pytest.mark.usefixtures("collector")
def test_what_the_user_froze_stays_frozen() -> None:
    gc.collect()
    gc.freeze()
    try:
        frozen = gc.get_freeze_count()
        with graph(HostGraph()):
            torch.ones(2).add_(1)
        assert gc.get_freeze_count() == frozen
    finally:
        gc.unfreeze()


def test_collection_forced_in_a_capture_spares_older_cycles() -> None:
    class Cycle:
        def __init__(self) -> None:
            self.me = self
            self.graph = HostGraph()

        def __del__(self) -> None:
            died.append(PROCESS.num_active)

    died: list[int] = []
    Cycle()
    with graph(HostGraph()):
        torch.ones(2).add_(1)
        gc.collect()
        assert died == []
    gc.collect()
    assert died == [0]


# Empty captures


def test_capture_without_a_node_warns_and_is_a_graph() -> None:
    g = HostGraph()
    with pytest.warns(UserWarning, match="recorded no node"), graph(g):
        pass
    g.replay()
    assert len(capture_nodes(g)) == 0


def test_warning_turned_error_comes_after_the_capture() -> None:
    g = HostGraph()
    with nothing_left_behind(), warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="no node"), graph(g):
            pass
    assert len(capture_nodes(g)) == 0
