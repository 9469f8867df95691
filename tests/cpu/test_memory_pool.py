"""The pool whose graphs share the memory of their outputs: what is lent, held, given back and let go."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from helpers.telling_host import (
    CPU,
    EVERYTHING,
    TellingHost,
    call,
    double,
    instance_of,
    replayed_on,
    shared_pool,
    views,
)
from helpers.two_streams import StreamedHost
from torch import Tensor

from graphcap_backend.capture.allocator import TouchedMemory
from graphcap_backend.capture.arena import Arena
from graphcap_backend.capture.callee import Callee, ReplayLimits
from graphcap_backend.capture.instance import Instance
from graphcap_backend.capture.memory_pool import HeldMemoryError
from graphcap_backend.capture.process import PROCESS, CaptureProcess
from graphcap_backend.capture.replay import Replayed
from graphcap_backend.capture.skip import SkipKind


def _num_kept() -> int:
    return len(PROCESS._outliving)


@pytest.fixture(autouse=True)
def _nothing_left_of_earlier_tests() -> None:
    gc.collect()
    PROCESS._let_go()


def test_views_that_are_lent_alias_each_other_as_the_outputs_do() -> None:
    instance = instance_of(Arena(TellingHost(EVERYTHING)), views)
    whole, rest, turned, nothing = instance.replay([torch.arange(4.0)])
    assert whole.tolist() == [0.0, 2.0, 4.0, 6.0]
    assert turned.tolist() == [[0.0, 4.0], [2.0, 6.0]]
    assert turned.stride() == (1, 2)
    assert rest.untyped_storage()._cdata == whole.untyped_storage()._cdata == turned.untyped_storage()._cdata
    assert nothing.shape == (0,)
    assert [out.num_bytes for out in instance.owned] == [16, 0]
    with pytest.raises(RuntimeError, match="not resizable"):
        whole.resize_(64)


def test_an_output_outside_of_what_was_touched_is_not_lent() -> None:
    (out,) = instance_of(Arena(TellingHost((1, 2)))).owned
    assert out.is_allocated
    with pytest.raises(AssertionError, match="the storage itself owns"):
        out.give_back()


def test_room_is_made_of_what_nobody_holds() -> None:
    arena = Arena(TellingHost(EVERYTHING))
    one = instance_of(arena)
    pool, (out,) = shared_pool(arena), one.owned
    y = call(one)
    view = y[1:]
    del y

    pool.make_room()
    assert out.is_allocated
    assert one.num_bytes == 32, "the host's buffer of its input, and the output"
    del view
    pool.make_room()
    assert not out.is_allocated
    assert one.num_bytes == 16
    assert call(one).tolist() == [0.0, 2.0, 4.0, 6.0]


@pytest.mark.parametrize("holder", ["tensor", "view", "storage", "saved by autograd"])
def test_what_is_held_again_after_it_was_given_back_is_left_out(holder: str) -> None:
    device = TellingHost(EVERYTHING)
    arena = Arena(device)
    one = instance_of(arena)
    pool, (out,) = shared_pool(arena), one.owned
    pool.make_room()
    assert device.asked_for_free_blocks == 0, "nothing is held: all the memory may be used"

    hold: dict[str, Callable[[Tensor], object]] = {
        "tensor": lambda y: y,
        "view": lambda y: y[3:],
        "storage": lambda y: y.untyped_storage(),
        "saved by autograd": lambda y: torch.ones(4, requires_grad=True) * y,
    }
    held = hold[holder](call(one))
    pool.make_room()
    assert device.asked_for_free_blocks == 1
    inside, touched = (out.range[0] + 4, out.range[0] + 5), TouchedMemory()
    for ranges in ([inside], [(0, 1), EVERYTHING], [(out.range[0] - 8, out.range[0] + 1)]):
        touched.ranges = ranges
        with pytest.raises(HeldMemoryError):
            pool.check(touched)
    touched.ranges = [(out.range[0] - 8, out.range[0]), (out.range[1], out.range[1] + 8)]
    pool.check(touched)

    del held
    touched.ranges = [inside]
    pool.check(touched)
    touched.exact = False
    with pytest.raises(HeldMemoryError):
        pool.check(touched)


def test_a_graph_that_would_write_to_what_is_held_is_dropped_with_all_that_it_had() -> None:
    device = TellingHost(EVERYTHING)
    arena = Arena(device)
    one = instance_of(arena)
    shared_pool(arena).make_room()
    y = call(one)
    with pytest.raises(HeldMemoryError):
        instance_of(arena)
    assert list(arena._instances) == [one]
    assert len(shared_pool(arena).outputs) == 1
    assert y.tolist() == [0.0, 2.0, 4.0, 6.0]
    device.touches = [(1, 2)]  # in a pool of its own
    copying = instance_of(arena, pool="copies")
    assert copying.idle()
    assert not copying.is_shared


def test_a_result_that_comes_back_while_a_graph_is_captured_is_seen() -> None:
    """By a replay on the way, which nothing rules out for user code that runs inside a capture."""
    device = TellingHost(EVERYTHING)
    arena = Arena(device)
    one, held = instance_of(arena), []
    shared_pool(arena).make_room()
    device.during_capture = lambda: held.append(call(one))
    with pytest.raises(HeldMemoryError):
        instance_of(arena)
    assert held[0].tolist() == [0.0, 2.0, 4.0, 6.0]


def test_two_graphs_in_one_memory_are_in_each_others_way() -> None:
    arena = Arena(TellingHost(EVERYTHING))
    one = instance_of(arena)
    two = instance_of(arena)  # had the first one's memory: it was given back
    assert [out.is_allocated for out in (*one.owned, *two.owned)] == [False, True]
    for here, there in ((one, two), (two, one)):
        y = call(here)
        assert not here.idle()
        assert not there.idle()
        del y
        assert here.idle()
        assert there.idle()


def test_graphs_beside_each_other_are_not() -> None:
    device = TellingHost(EVERYTHING)
    arena = Arena(device)
    one = instance_of(arena)
    device.touches = [(1, 2)]
    y = call(one)
    two = instance_of(arena)
    assert two.idle()
    assert not one.idle()
    del y


@pytest.mark.parametrize("say_so", [True, False], ids=["released", "dropped"])
def test_a_pool_lives_as_long_as_what_is_held_of_it(say_so: bool) -> None:
    arena = Arena(TellingHost(EVERYTHING))
    one = instance_of(arena)
    shared_pool(arena).make_room()
    y, pool, before = call(one), weakref.ref(shared_pool(arena)), _num_kept()
    if say_so:
        one.release()
    del one
    gc.collect()
    assert pool() is not None
    assert _num_kept() == before + 1
    PROCESS._let_go()
    assert pool() is not None, "it is held still"
    assert shared_pool(arena) is pool(), "and serves later graphs"
    assert y.shape == (4,)

    del y
    PROCESS._let_go()
    assert pool() is None
    assert _num_kept() == before


@pytest.mark.parametrize("say_so", [True, False], ids=["released", "dropped"])
def test_nothing_is_kept_of_a_graph_whose_results_are_gone(say_so: bool) -> None:
    arena = Arena(TellingHost(EVERYTHING))
    one, before = instance_of(arena), _num_kept()
    call(one)
    pool = weakref.ref(shared_pool(arena))
    if say_so:
        one.release()
    del one
    gc.collect()
    assert pool() is None
    assert _num_kept() == before
    assert not arena._pools


def test_a_held_result_of_a_graph_that_is_gone_is_left_out_until_it_is_dropped() -> None:
    device = TellingHost(EVERYTHING)
    arena = Arena(device)
    one, other = instance_of(arena), instance_of(arena)
    pool = shared_pool(arena)
    y = call(one)
    one.release()
    pool.make_room()
    assert len(pool.outputs) == 2
    assert not other.idle()
    with pytest.raises(HeldMemoryError):
        instance_of(arena)
    del y
    pool.make_room()
    assert [out.released for out in pool.outputs] == [False]
    assert other.idle()
    assert instance_of(arena).idle()


def test_only_the_graph_of_a_resized_result_is_dropped() -> None:
    arena = Arena(StreamedHost())
    dropped: list[tuple[int, bool]] = []
    one, two = instance_of(arena, pool=0), instance_of(arena, pool=1)
    one.drop = lambda *, resized=False: dropped.append((1, resized))
    two.drop = lambda *, resized=False: dropped.append((2, resized))
    assert not arena.drop_resized()
    assert dropped == []

    y = call(one)
    y.untyped_storage().resize_(0)
    assert not one.idle(), "resized, and held"
    assert arena.drop_resized()
    assert dropped == [(1, True)]
    del y
    assert not one.idle(), "its memory is gone for good"
    assert two.idle()


def test_results_that_are_always_resized_are_copies_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    captured: list[Instance] = []
    arena = Arena(StreamedHost())
    replayed = replayed_on(arena, captured, monkeypatch)
    for _ in range(30):
        (y,) = replayed([2, torch.arange(4.0)])
        assert y.tolist() == [0.0, 2.0, 4.0, 6.0]
        y.untyped_storage().resize_(0)
    assert len(captured) <= 6
    assert [instance.copies for instance in captured[-2:]] == [False, True]
    assert replayed.fallbacks == {SkipKind.WARM_UP: 1}


def test_a_function_is_freed_without_the_garbage_collector() -> None:
    collects = gc.isenabled()
    gc.disable()
    try:
        replayed = Replayed(
            Callee(run=double, name="double", device=CPU),
            limits=ReplayLimits(),
            annotations=None,
            on_skip=lambda reason: None,
        )
        known = weakref.ref(replayed)
        del replayed
        assert known() is None
    finally:
        if collects:
            gc.enable()


@pytest.mark.parametrize("how", ["watched", "its own"])
def test_a_stream_that_used_what_is_gone_is_waited_for(how: str) -> None:
    device = TellingHost(EVERYTHING)
    arena = Arena(device)
    one, two = instance_of(arena), instance_of(arena) if how == "watched" else None
    arena.order(one)
    device.now = 7
    arena.order(one)
    y = call(one)
    arena.last_stream = 0
    device.now = 0
    del y  # stream 7 may still read it
    one.release()
    if two is None:
        two = instance_of(arena)
    device.waits.clear()
    arena.order(two)
    assert (0, 7) in device.waits
    device.waits.clear()
    arena.order(two)
    assert device.waits == []


def test_memory_of_a_pool_comes_back_at_a_collection_once_nothing_is_held() -> None:
    arena = Arena(TellingHost(EVERYTHING))
    one = instance_of(arena)
    pool = weakref.ref(shared_pool(arena))
    y = call(one)
    one.release()
    del one
    gc.collect()
    assert pool() is not None
    del y
    gc.collect()
    assert pool() is None


def test_what_was_handed_out_by_a_graph_that_is_gone_keeps_no_memory() -> None:
    arena = Arena(TellingHost(EVERYTHING))
    stays, goes = instance_of(arena), instance_of(arena)
    pool = shared_pool(arena)
    call(goes)
    kept = [weakref.ref(tensor) for out in goes.owned for tensor in out._kept or ()]
    assert [ref() is not None for ref in kept] == [True]
    goes.release()
    del goes
    pool.make_room()
    assert [ref() for ref in kept] == [None]
    assert call(stays).tolist() == [0.0, 2.0, 4.0, 6.0]


def test_results_that_are_handed_out_and_dropped_are_forgotten() -> None:
    arena = Arena(TellingHost(EVERYTHING))
    instances = [instance_of(arena) for _ in range(30)]
    pool = shared_pool(arena)
    held = [call(instances[0]), call(instances[1])]
    for instance in instances[2:]:
        call(instance)
    assert len(pool._handed_out) <= 10
    # Each lies in memory that all others write to.
    assert [instance.idle() for instance in instances] == [False] * 30
    del held[0]
    assert [instance.idle() for instance in instances] == [False] * 30
    del held[0]
    assert [instance.idle() for instance in instances] == [True] * 30


def test_letting_go_loses_nothing_to_an_interrupt_and_bears_others_that_do_the_same() -> None:
    process = CaptureProcess()
    kept = [_Kept() for _ in range(3)]
    known = [weakref.ref(one) for one in kept]

    def interrupted() -> bool:
        raise KeyboardInterrupt

    def let_go_meanwhile() -> bool:
        if not process_is_busy:
            process_is_busy.append(True)
            process._let_go()
        return False

    process_is_busy: list[bool] = []
    process.keep_while(let_go_meanwhile, kept[0])
    process.keep_while(lambda: True, kept[1])
    process._let_go()
    process.keep_while(interrupted, kept[2])
    kept.clear()
    with pytest.raises(KeyboardInterrupt):
        process._let_go()
    assert [ref() is not None for ref in known] == [False, True, True]
    gc.callbacks.remove(process._after_collection)


class _Kept:
    """Something to be kept."""
