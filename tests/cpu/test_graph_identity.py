"""Which capture and which executable graph a graph object holds, when addresses come back.

The graph here is a stand-in that gives every capture and every executable graph the same addresses, as
the driver often does; what CUPTI would answer is a count.
"""

from __future__ import annotations

import gc
import itertools
import weakref
from typing import Any

import pytest

from graphcap_backend.annotate import cupti
from graphcap_backend.annotate.process import PROCESS
from graphcap_backend.capture import driver
from graphcap_backend.capture.call_watch import CallWatch
from graphcap_backend.capture.record import CudaKeys
from graphcap_backend.errors import CuptiError, CuptiMissingError


class SameAddresses:
    """Has what ``CudaKeys`` looks at."""

    def __init__(self) -> None:
        self.has_exec = False
        self.is_captured = True

    def raw_cuda_graph(self) -> int:
        if not self.is_captured:
            raise RuntimeError("no graph")
        return 0x1000

    def raw_cuda_graph_exec(self) -> int:
        if not self.has_exec:
            raise RuntimeError("not instantiated")
        return 0x2000

    def pool(self) -> tuple[int, int]:
        return (0, 1)

    def instantiate(self) -> None:
        self.has_exec = True

    def reset(self) -> None:
        self.has_exec = self.is_captured = False


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The handles that CUPTI was asked for; its answers count from 100."""
    handles: list[int] = []
    answers = itertools.count(100)

    def graph_exec_id(handle: int) -> int:
        handles.append(handle)
        return next(answers)

    monkeypatch.setattr(driver, "graph_exec_id", lambda _: None)  # a driver before 13.1
    monkeypatch.setattr(cupti, "graph_exec_id", graph_exec_id)
    return handles


def test_an_executable_graph_is_asked_for_once(asked: list[int]) -> None:
    g = SameAddresses()
    keys = CudaKeys(g, source_graph_id=5, keep_graph=True)
    assert keys.exec_graph_id() is None
    assert vars(g).get("instantiate") is None  # nothing lies over it before CUPTI is needed
    g.instantiate()
    assert [keys.exec_graph_id() for _ in range(4)] == [100] * 4
    assert len(asked) == 1


def test_a_new_one_at_the_same_address_is_noticed(asked: list[int]) -> None:
    g = SameAddresses()
    keys = CudaKeys(g, source_graph_id=5, keep_graph=True)
    found = []
    for _ in range(3):
        g.instantiate()
        found += [keys.exec_graph_id(), keys.exec_graph_id()]
    assert found == [100, 100, 101, 101, 102, 102]


def test_an_answer_got_while_instantiate_runs_is_not_kept(asked: list[int]) -> None:
    class Slow(SameAddresses):
        def instantiate(self) -> None:
            if self.has_exec:
                during.append(keys.exec_graph_id())  # as another thread may ask
            super().instantiate()

    during: list[int | None] = []
    g = Slow()
    g.instantiate()
    keys = CudaKeys(g, source_graph_id=5, keep_graph=True)
    assert keys.exec_graph_id() == 100
    g.instantiate()
    assert (during, keys.exec_graph_id()) == ([101], 102)


def test_without_keep_graph_nothing_lies_over_instantiate(asked: list[int]) -> None:
    g = SameAddresses()
    g.has_exec = True
    keys = CudaKeys(g, source_graph_id=5, keep_graph=False)
    assert [keys.exec_graph_id() for _ in range(3)] == [100] * 3
    assert "instantiate" not in vars(g)


def test_a_driver_that_tells_ids_is_asked_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = iter((7, 8))
    monkeypatch.setattr(driver, "graph_exec_id", lambda _: next(ids))
    g = SameAddresses()
    g.instantiate()
    keys = CudaKeys(g, source_graph_id=5, keep_graph=True)
    assert [keys.exec_graph_id(), keys.exec_graph_id()] == [7, 8]
    assert "instantiate" not in vars(g)


@pytest.mark.parametrize(("error", "times"), [(CuptiMissingError("a", "b", "c"), 1), (CuptiError("a", "b"), 3)])
def test_without_an_answer_a_number_stands_in(
    asked: list[int], monkeypatch: pytest.MonkeyPatch, error: CuptiError, times: int
) -> None:
    def fails(handle: int) -> int:
        asked.append(handle)
        raise error

    monkeypatch.setattr(cupti, "graph_exec_id", fails)
    g = SameAddresses()
    g.instantiate()
    keys = CudaKeys(g, source_graph_id=5, keep_graph=True)
    assert len({keys.exec_graph_id() for _ in range(3)}) == 1
    assert len(asked) == times  # a missing library stays missing, another error may not


@pytest.mark.parametrize("keep_graph", [False, True])
def test_reset_and_a_capture_by_others_at_the_same_address_end_it(keep_graph: bool) -> None:
    g = SameAddresses()
    g.instantiate()
    keys = CudaKeys(g, source_graph_id=5, keep_graph=keep_graph)
    assert keys.alive()
    g.reset()
    g.is_captured = g.has_exec = True  # torch.cuda.graph(g, pool=the same)
    assert not keys.alive()
    assert keys.exec_graph_id() is None


def test_watches_neither_keep_the_graph_nor_hide_what_they_cover() -> None:
    called = []
    g: Any = SameAddresses()
    g.instantiate = lambda: called.append("the user's own")
    watch = CallWatch.on(g, "instantiate")
    assert CallWatch.on(g, "instantiate") is watch
    g.instantiate()
    assert (called, watch.count) == (["the user's own"], 2)
    reset = CallWatch.on(g, "reset")
    gc.disable()
    try:
        dead = weakref.ref(g)
        del g, watch
        assert dead() is None
    finally:
        gc.enable()
    reset()  # of a graph that is gone: nothing to do


def test_listeners_are_told_before_the_method_runs() -> None:
    g = SameAddresses()
    seen: list[bool] = []
    CallWatch.on(g, "reset").tell(lambda: seen.append(g.is_captured))
    g.reset()
    assert (seen, g.is_captured) == ([True], False)


def test_cupti_is_given_back_at_the_end_of_the_questions(monkeypatch: pytest.MonkeyPatch) -> None:
    happened: list[str] = []

    class Callbacks:
        def __init__(self) -> None:
            self.num_users = 0
            happened.append("up")

        def close(self) -> None:
            happened.append("down")

    monkeypatch.setattr(cupti, "NodeCallbacks", Callbacks)
    with cupti.asked_together():
        for _ in range(3):
            cupti.acquire_callbacks()
            cupti.release_callbacks()
        with cupti.asked_together():
            pass
        assert happened == ["up"]
    assert happened == ["up", "down"]
    cupti.acquire_callbacks()  # a capture records
    with pytest.raises(ZeroDivisionError), cupti.asked_together():
        raise ZeroDivisionError
    assert happened == ["up", "down", "up"]
    cupti.release_callbacks()
    assert happened[3:] == ["down"]
    assert (PROCESS.callbacks, PROCESS.num_asking) == (None, 0)
