"""The pool whose graphs share the memory of their outputs, on a host that tells which memory a capture touched.

No host graph writes to another's memory: the tests say which memory a graph is to be taken to have touched.
"""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from helpers.two_streams import StreamedHost
from torch import Tensor

from graphcap_backend.capture.allocator import FreeBlock, Range, TouchedMemory, overlap, range_of
from graphcap_backend.capture.arena import Arena
from graphcap_backend.capture.callee import Callee, ReplayLimits
from graphcap_backend.capture.inputs import assign_roles
from graphcap_backend.capture.instance import Instance
from graphcap_backend.capture.memory_pool import HeldMemoryError, PoolName, SharedPool
from graphcap_backend.capture.process import PROCESS
from graphcap_backend.capture.replay import Replayed
from graphcap_backend.capture.skip import SkipKind

CPU = torch.device("cpu")
MIB = 1 << 20
EVERYTHING: Range = (1, 1 << 62)


class _Telling(StreamedHost):
    """Says that captures touched ``touches`` of a pool of ``pool_bytes``."""

    def __init__(self, *touches: Range) -> None:
        super().__init__()
        self.touches = list(touches)
        self.exact = True
        self.pool_bytes = 0
        self.during_capture: Callable[[], None] = lambda: None
        """Runs after each capture, before anybody knows what it touched."""
        self.asked_for_free_blocks = 0

    @contextlib.contextmanager
    def touched_memory(self, pool: Any) -> Iterator[TouchedMemory]:
        touched = TouchedMemory()
        yield touched
        self.during_capture()
        touched.ranges, touched.exact, touched.pool_bytes = list(self.touches), self.exact, self.pool_bytes

    def free_blocks(self, pool: Any) -> list[FreeBlock]:
        self.asked_for_free_blocks += 1
        return []


def _double(inputs: list[Any]) -> Sequence[Any]:
    (x,) = inputs
    inputs.clear()
    return [x * 2]


def _views(inputs: list[Any]) -> Sequence[Any]:
    (x,) = inputs
    inputs.clear()
    y = x * 2
    return [y, y[2:], y.view(2, 2).t(), x[:0] * 2]


def _nothing(inputs: list[Any]) -> Sequence[Any]:
    inputs.clear()
    return []


def _instance(arena: Arena, run: Callable[[list[Any]], Sequence[Any]] = _double, pool: PoolName = "shared") -> Instance:
    x = torch.ones(4)
    return Instance(run, [x], assign_roles([x], (), (), CPU), arena=arena, pool=pool)


def _call(instance: Instance) -> Tensor:
    result = instance.replay([torch.arange(4.0)])[0]
    assert isinstance(result, Tensor)
    return result


def _shared(arena: Arena) -> SharedPool:
    pool = arena.pool("shared")
    assert isinstance(pool, SharedPool)
    return pool


def _num_kept() -> int:
    return len(PROCESS._outliving)


@pytest.fixture(autouse=True)
def _nothing_left_of_earlier_tests() -> None:
    gc.collect()
    PROCESS._let_go()


def test_views_that_are_lent_alias_each_other_as_the_outputs_do() -> None:
    instance = _instance(Arena(_Telling(EVERYTHING)), _views)
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
    (out,) = _instance(Arena(_Telling((1, 2)))).owned
    assert out.is_allocated
    with pytest.raises(AssertionError, match="the storage itself owns"):
        out.give_back()


def test_room_is_made_of_what_nobody_holds() -> None:
    arena = Arena(_Telling(EVERYTHING))
    one = _instance(arena)
    pool, (out,) = _shared(arena), one.owned
    y = _call(one)
    view = y[1:]
    del y

    pool.make_room()
    assert out.is_allocated
    assert one.num_bytes == 32, "the host's buffer of its input, and the output"
    del view
    pool.make_room()
    assert not out.is_allocated
    assert one.num_bytes == 16
    assert _call(one).tolist() == [0.0, 2.0, 4.0, 6.0]


@pytest.mark.parametrize("holder", ["tensor", "view", "storage", "saved by autograd"])
def test_what_is_held_again_after_it_was_given_back_is_left_out(holder: str) -> None:
    device = _Telling(EVERYTHING)
    arena = Arena(device)
    one = _instance(arena)
    pool, (out,) = _shared(arena), one.owned
    pool.make_room()
    assert device.asked_for_free_blocks == 0, "nothing is held: all the memory may be used"

    hold: dict[str, Callable[[Tensor], object]] = {
        "tensor": lambda y: y,
        "view": lambda y: y[3:],
        "storage": lambda y: y.untyped_storage(),
        "saved by autograd": lambda y: torch.ones(4, requires_grad=True) * y,
    }
    held = hold[holder](_call(one))
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
    device = _Telling(EVERYTHING)
    arena = Arena(device)
    one = _instance(arena)
    _shared(arena).make_room()
    y = _call(one)
    with pytest.raises(HeldMemoryError):
        _instance(arena)
    assert list(arena._instances) == [one]
    assert len(_shared(arena).outputs) == 1
    assert y.tolist() == [0.0, 2.0, 4.0, 6.0]
    device.touches = [(1, 2)]  # in a pool of its own
    copying = _instance(arena, pool="copies")
    assert copying.idle()
    assert not copying.is_shared


def test_a_result_that_comes_back_while_a_graph_is_captured_is_seen() -> None:
    """By a replay on the way, which nothing rules out for user code that runs inside a capture."""
    device = _Telling(EVERYTHING)
    arena = Arena(device)
    one, held = _instance(arena), []
    _shared(arena).make_room()
    device.during_capture = lambda: held.append(_call(one))
    with pytest.raises(HeldMemoryError):
        _instance(arena)
    assert held[0].tolist() == [0.0, 2.0, 4.0, 6.0]


def test_two_graphs_in_one_memory_are_in_each_others_way() -> None:
    arena = Arena(_Telling(EVERYTHING))
    one = _instance(arena)
    two = _instance(arena)  # had the first one's memory: it was given back
    assert [out.is_allocated for out in (*one.owned, *two.owned)] == [False, True]
    for here, there in ((one, two), (two, one)):
        y = _call(here)
        assert not here.idle()
        assert not there.idle()
        del y
        assert here.idle()
        assert there.idle()


def test_graphs_beside_each_other_are_not() -> None:
    device = _Telling(EVERYTHING)
    arena = Arena(device)
    one = _instance(arena)
    device.touches = [(1, 2)]
    y = _call(one)
    two = _instance(arena)
    assert two.idle()
    assert not one.idle()
    del y


@pytest.mark.parametrize("say_so", [True, False], ids=["released", "dropped"])
def test_a_pool_lives_as_long_as_what_is_held_of_it(say_so: bool) -> None:
    arena = Arena(_Telling(EVERYTHING))
    one = _instance(arena)
    _shared(arena).make_room()
    y, pool, before = _call(one), weakref.ref(_shared(arena)), _num_kept()
    if say_so:
        one.release()
    del one
    gc.collect()
    assert pool() is not None
    assert _num_kept() == before + 1
    PROCESS._let_go()
    assert pool() is not None, "it is held still"
    assert _shared(arena) is pool(), "and serves later graphs"
    assert y.shape == (4,)

    del y
    PROCESS._let_go()
    assert pool() is None
    assert _num_kept() == before


@pytest.mark.parametrize("say_so", [True, False], ids=["released", "dropped"])
def test_nothing_is_kept_of_a_graph_whose_results_are_gone(say_so: bool) -> None:
    arena = Arena(_Telling(EVERYTHING))
    one, before = _instance(arena), _num_kept()
    _call(one)
    pool = weakref.ref(_shared(arena))
    if say_so:
        one.release()
    del one
    gc.collect()
    assert pool() is None
    assert _num_kept() == before
    assert not arena._pools


def test_a_held_result_of_a_graph_that_is_gone_is_left_out_until_it_is_dropped() -> None:
    device = _Telling(EVERYTHING)
    arena = Arena(device)
    one, other = _instance(arena), _instance(arena)
    pool = _shared(arena)
    y = _call(one)
    one.release()
    pool.make_room()
    assert len(pool.outputs) == 2
    assert not other.idle()
    with pytest.raises(HeldMemoryError):
        _instance(arena)
    del y
    pool.make_room()
    assert [out.released for out in pool.outputs] == [False]
    assert other.idle()
    assert _instance(arena).idle()


def _sized(device: _Telling, arena: Arena, *, needs: int, pool_bytes: int) -> Instance:
    device.touches, device.pool_bytes = [(1 << 40, (1 << 40) + needs)], pool_bytes
    return _instance(arena, _nothing)


@pytest.mark.parametrize(
    ("earlier", "newest", "pool_bytes", "expected"),
    [
        ((), 100 * MIB, 300 * MIB, False),  # nothing to drop
        ((50,), 100 * MIB, 150 * MIB, True),
        ((50, 20), 100 * MIB, 125 * MIB, True),
        ((50,), 100 * MIB, 125 * MIB - 1, False),  # less than a quarter
        ((10,), 20 * MIB, 36 * MIB, True),
        ((10,), 20 * MIB, 36 * MIB - 1, False),  # less than 16 MiB
        ((100,), 100 * MIB, 300 * MIB, False),  # not the largest
        ((20, 200), 100 * MIB, 300 * MIB, False),
    ],
)
def test_a_pool_is_loose_behind_a_larger_graph(
    earlier: tuple[int, ...], newest: int, pool_bytes: int, expected: bool
) -> None:
    device = _Telling()
    arena = Arena(device)
    kept = [_sized(device, arena, needs=mib * MIB, pool_bytes=0) for mib in earlier]
    last = _sized(device, arena, needs=newest, pool_bytes=pool_bytes)
    assert arena.is_loose(last) is expected
    assert all(instance.is_shared for instance in kept)


def test_only_graphs_of_the_shared_pool_make_it_loose() -> None:
    device = _Telling((1, 100 * MIB))
    arena = Arena(device)
    device.pool_bytes = 1 << 40
    kept = [_instance(arena, _nothing, name) for name in ("shared", 0, "copies")]
    device.touches = [(1, 200 * MIB)]
    later: tuple[PoolName, ...] = (1, "copies", "shared")
    assert [arena.is_loose(_instance(arena, _nothing, name)) for name in later] == [False, False, True]
    assert kept[0].is_shared


def test_dropping_the_shared_pool_leaves_the_others_and_what_is_held() -> None:
    arena = Arena(_Telling(EVERYTHING))
    dropped: list[Instance] = []

    def droppable(name: PoolName) -> Instance:
        instance = _instance(arena, pool=name)
        known = weakref.ref(instance)

        def drop(*, resized: bool = False) -> None:
            assert not resized
            alive = known()
            assert alive is not None
            dropped.append(alive)
            alive.release()

        instance.drop = drop
        return instance

    one, two, plain = droppable("shared"), droppable("shared"), droppable(0)
    old = _shared(arena)
    y = _call(two)
    arena.drop_shared()
    assert set(map(id, dropped)) == {id(one), id(two)}
    assert list(arena._instances) == [plain]
    assert _shared(arena) is not old
    assert y.tolist() == [0.0, 2.0, 4.0, 6.0]

    known = weakref.ref(old)
    del old
    assert known() is not None
    del y
    PROCESS._let_go()
    assert known() is None


def test_only_the_graph_of_a_resized_result_is_dropped() -> None:
    arena = Arena(StreamedHost())
    dropped: list[tuple[int, bool]] = []
    one, two = _instance(arena, pool=0), _instance(arena, pool=1)
    one.drop = lambda *, resized=False: dropped.append((1, resized))
    two.drop = lambda *, resized=False: dropped.append((2, resized))
    assert not arena.drop_resized()
    assert dropped == []

    y = _call(one)
    y.untyped_storage().resize_(0)
    assert not one.idle(), "resized, and held"
    assert arena.drop_resized()
    assert dropped == [(1, True)]
    del y
    assert not one.idle(), "its memory is gone for good"
    assert two.idle()


def _replayed(arena: Arena, captured: list[Instance], monkeypatch: pytest.MonkeyPatch) -> Replayed:
    monkeypatch.setitem(Arena._of_device, CPU, arena)  # type: ignore[arg-type]

    def scale(inputs: list[Any]) -> Sequence[Any]:
        number, x = inputs
        inputs.clear()
        return [x * number]

    return Replayed(
        Callee(run=scale, name="scale", device=CPU, may_share_outputs=True),
        limits=ReplayLimits(),
        annotations=None,
        on_skip=lambda reason: None,
        on_capture=captured.append,
    )


def test_results_that_are_always_resized_are_copies_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    captured: list[Instance] = []
    arena = Arena(StreamedHost())
    replayed = _replayed(arena, captured, monkeypatch)
    for _ in range(30):
        (y,) = replayed([2, torch.arange(4.0)])
        assert y.tolist() == [0.0, 2.0, 4.0, 6.0]
        y.untyped_storage().resize_(0)
    assert len(captured) <= 6
    assert [instance.copies for instance in captured[-2:]] == [False, True]
    assert replayed.fallbacks == {SkipKind.WARM_UP: 1}


class _Growing(_Telling):
    """Each key's graphs need as many MiB as its number says, and the pool is a third larger than the largest."""

    number = 0

    @contextlib.contextmanager
    def touched_memory(self, pool: Any) -> Iterator[TouchedMemory]:
        self.touches = [(1 << 40, (1 << 40) + self.number * MIB)]
        self.pool_bytes = self.number * MIB * 4 // 3 + 20 * MIB
        with super().touched_memory(pool) as touched:
            yield touched

    def may_share_outputs(self) -> bool:
        return True


def test_ever_larger_keys_are_captured_three_times_on_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    device, captured = _Growing(), []
    arena = Arena(device)
    replayed = _replayed(arena, captured, monkeypatch)
    numbers = range(40, 60)
    for largest in numbers:
        for number in range(40, largest + 1):
            for _ in range(2):
                device.number = number
                (y,) = replayed([number, torch.ones(4)])
                assert y.tolist() == [float(number)] * 4
                del y
    assert len(numbers) < len(captured) <= 3 * len(numbers)
    assert all(instance.is_shared for family in replayed.families for instance in family.instances)
    assert len(replayed.families) == len(numbers)


def test_a_function_moves_into_the_shared_pool_once_it_needs_much(monkeypatch: pytest.MonkeyPatch) -> None:
    device, captured = _Growing(), []
    arena = Arena(device)
    replayed = _replayed(arena, captured, monkeypatch)

    def call(number: int) -> None:
        device.number = number
        (y,) = replayed([number, torch.ones(4)])
        assert y.tolist() == [float(number)] * 4

    for number in (3, 3, 4, 4):
        call(number)
    assert [instance.is_shared for instance in captured] == [False, False]
    call(32)
    call(32)
    assert [family.key[0] for family in replayed.families] == [(32,)], "the others are captured anew"
    call(3)
    assert [family.key[0] for family in replayed.families] == [(32,), (3,)]
    assert all(instance.is_shared for family in replayed.families for instance in family.instances)
    assert replayed.fallbacks == {SkipKind.WARM_UP: 3}
    assert replayed.num_replays == 4


def test_a_second_capture_that_fails_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    device, captured = _Growing(), []
    arena = Arena(device)
    replayed = _replayed(arena, captured, monkeypatch)
    failures: list[None] = []

    def fail_in_the_shared_pool() -> None:
        if len(failures) < 1 and "shared" in arena._pools:
            failures.append(None)
            raise torch.OutOfMemoryError("no room for two pools")

    device.during_capture, device.number = fail_in_the_shared_pool, 64
    for _ in range(4):
        assert replayed([2, torch.ones(4)])[0].tolist() == [2.0] * 4
    assert failures == [None]
    assert replayed.num_replays == 2
    assert [instance.is_shared for instance in captured] == [True]


def test_a_function_is_freed_without_the_garbage_collector() -> None:
    collects = gc.isenabled()
    gc.disable()
    try:
        replayed = Replayed(
            Callee(run=_double, name="double", device=CPU),
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
    device = _Telling(EVERYTHING)
    arena = Arena(device)
    one, two = _instance(arena), _instance(arena) if how == "watched" else None
    arena.order(one)
    device.now = 7
    arena.order(one)
    y = _call(one)
    arena.last_stream = 0
    device.now = 0
    del y  # stream 7 may still read it
    one.release()
    if two is None:
        two = _instance(arena)
    device.waits.clear()
    arena.order(two)
    assert (0, 7) in device.waits
    device.waits.clear()
    arena.order(two)
    assert device.waits == []


def test_memory_of_a_pool_comes_back_at_a_collection_once_nothing_is_held() -> None:
    arena = Arena(_Telling(EVERYTHING))
    one = _instance(arena)
    pool = weakref.ref(_shared(arena))
    y = _call(one)
    one.release()
    del one
    gc.collect()
    assert pool() is not None
    del y
    gc.collect()
    assert pool() is None


def _snapshot(events: Sequence[tuple[str, int, int]], segments: Sequence[tuple[tuple[int, int], int, int]]) -> Any:
    return {
        "segments": [
            {"segment_pool_id": pool, "address": address, "total_size": size} for pool, address, size in segments
        ],
        "device_traces": [[], [{"action": action, "addr": address, "size": size} for action, address, size in events]],
    }


def test_what_a_capture_touched_is_what_it_allocated_in_its_pool() -> None:
    snapshot = _snapshot(
        [
            ("alloc", 1000, 10),  # another pool's
            ("alloc", 2000, 100),
            ("free_requested", 2000, 100),
            ("free_completed", 2000, 100),
            ("alloc", 2000, 40),
            ("segment_alloc", 4096, 512),
            ("alloc", 4096, 512),
        ],
        [((0, 0), 1000, 500), ((0, 7), 2000, 200), ((0, 7), 4096, 512)],
    )
    touched = TouchedMemory()
    touched.read(snapshot, 1, [0, 7], exact=True)
    assert touched.ranges == [(2000, 2100), (2000, 2040), (4096, 4608)]
    assert (touched.num_bytes, touched.pool_bytes, touched.exact) == (612, 712, True)

    unsure = TouchedMemory()
    unsure.read(snapshot, 1, (0, 7), exact=False)
    assert unsure.ranges == [(2000, 2200), (4096, 4608)]
    assert (unsure.num_bytes, unsure.exact) == (712, False)


def test_what_was_only_kept_free_was_not_touched() -> None:
    kept = torch.empty(100, dtype=torch.uint8)
    first, last = range_of(kept.untyped_storage())
    segments = [((0, 7), first, 100)]
    for later, expected in (
        ([], []),
        ([("alloc", first, 100)], [(first, last)]),
        ([("alloc", first, 8)], [(first, first + 8)]),
    ):
        touched = TouchedMemory()
        touched.leave_out(kept.untyped_storage())
        touched.read(_snapshot([("alloc", first, 100), *later], segments), 1, (0, 7), exact=True)
        assert touched.ranges == expected


@pytest.mark.parametrize(
    ("ranges", "expected"),
    [([], 0), ([(10, 20), (10, 20)], 10), ([(30, 40), (10, 20)], 20), ([(10, 40), (20, 30), (35, 50)], 40)],
)
def test_bytes_are_counted_once(ranges: list[Range], expected: int) -> None:
    assert TouchedMemory(ranges).num_bytes == expected


@pytest.mark.parametrize(
    ("one", "expected"), [((0, 0), False), ((5, 10), False), ((5, 11), True), ((12, 13), True), ((20, 30), False)]
)
def test_ranges_that_only_meet_do_not_overlap(one: Range, expected: bool) -> None:
    assert overlap(one, [(10, 20)]) is expected


def test_what_was_handed_out_by_a_graph_that_is_gone_keeps_no_memory() -> None:
    arena = Arena(_Telling(EVERYTHING))
    stays, goes = _instance(arena), _instance(arena)
    pool = _shared(arena)
    _call(goes)
    kept = [weakref.ref(tensor) for out in goes.owned for tensor in out._kept or ()]
    assert [ref() is not None for ref in kept] == [True]
    goes.release()
    del goes
    pool.make_room()
    assert [ref() for ref in kept] == [None]
    assert _call(stays).tolist() == [0.0, 2.0, 4.0, 6.0]


def test_results_that_are_handed_out_and_dropped_are_forgotten() -> None:
    arena = Arena(_Telling(EVERYTHING))
    instances = [_instance(arena) for _ in range(30)]
    pool = _shared(arena)
    held = [_call(instances[0]), _call(instances[1])]
    for instance in instances[2:]:
        _call(instance)
    assert len(pool._handed_out) <= 10
    # Each lies in memory that all others write to.
    assert [instance.idle() for instance in instances] == [False] * 30
    del held[0]
    assert [instance.idle() for instance in instances] == [False] * 30
    del held[0]
    assert [instance.idle() for instance in instances] == [True] * 30
