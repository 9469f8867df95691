"""When graphs move into the shared pool, and when that is packed anew."""

from __future__ import annotations

import weakref

import pytest
import torch
from helpers.telling_host import (
    EVERYTHING,
    MIB,
    GrowingHost,
    TellingHost,
    call,
    instance_of,
    nothing,
    replayed_on,
    shared_pool,
)
from torch import Tensor

from graphcap_backend.capture.arena import Arena
from graphcap_backend.capture.instance import Instance
from graphcap_backend.capture.memory_pool import PoolName
from graphcap_backend.capture.process import PROCESS
from graphcap_backend.capture.skip import SkipKind


def _sized(device: TellingHost, arena: Arena, *, needs: int, pool_bytes: int) -> Instance:
    device.touches, device.pool_bytes = [(1 << 40, (1 << 40) + needs)], pool_bytes
    return instance_of(arena, nothing)


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
    device = TellingHost()
    arena = Arena(device)
    kept = [_sized(device, arena, needs=mib * MIB, pool_bytes=0) for mib in earlier]
    last = _sized(device, arena, needs=newest, pool_bytes=pool_bytes)
    assert arena.is_loose(last) is expected
    assert all(instance.is_shared for instance in kept)


def test_only_graphs_of_the_shared_pool_make_it_loose() -> None:
    device = TellingHost((1, 100 * MIB))
    arena = Arena(device)
    device.pool_bytes = 1 << 40
    kept = [instance_of(arena, nothing, name) for name in ("shared", 0, "copies")]
    device.touches = [(1, 200 * MIB)]
    later: tuple[PoolName, ...] = (1, "copies", "shared")
    assert [arena.is_loose(instance_of(arena, nothing, name)) for name in later] == [False, False, True]
    assert kept[0].is_shared


def test_dropping_the_shared_pool_leaves_the_others_and_what_is_held() -> None:
    arena = Arena(TellingHost(EVERYTHING))
    dropped: list[Instance] = []

    def droppable(name: PoolName) -> Instance:
        instance = instance_of(arena, pool=name)
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
    old = shared_pool(arena)
    y = call(two)
    arena.drop_shared()
    assert set(map(id, dropped)) == {id(one), id(two)}
    assert list(arena._instances) == [plain]
    assert shared_pool(arena) is not old
    assert y.tolist() == [0.0, 2.0, 4.0, 6.0]

    known = weakref.ref(old)
    del old
    assert known() is not None
    del y
    PROCESS._let_go()
    assert known() is None


def test_a_function_moves_into_the_shared_pool_once_it_needs_much(monkeypatch: pytest.MonkeyPatch) -> None:
    device, captured = GrowingHost(), []
    arena = Arena(device)
    replayed = replayed_on(arena, captured, monkeypatch)

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
    device, captured = GrowingHost(), []
    arena = Arena(device)
    replayed = replayed_on(arena, captured, monkeypatch)
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


def test_each_graph_is_captured_three_times_at_most_on_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    device, captured = GrowingHost(), []
    arena, every = Arena(device), []
    add = arena.add
    monkeypatch.setattr(arena, "add", lambda instance: (every.append(instance.touched.num_bytes), add(instance)))
    replayed = replayed_on(arena, captured, monkeypatch)
    numbers = [int(40 * 1.5**power) for power in range(10)]
    for count in range(1, len(numbers) + 1):
        for number in numbers[:count]:
            device.number = number
            for _ in range(3):
                assert replayed([number, torch.ones(4)])[0].tolist() == [float(number)] * 4
    assert len(numbers) < len(every) <= 3 * len(numbers)
    assert len(replayed.families) == len(numbers)
    assert all(instance.is_shared for family in replayed.families for instance in family.instances)


def test_a_result_that_is_in_the_way_once_does_not_make_copies_of_all_later_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device, captured = GrowingHost(), []
    device.touches_all = True
    arena = Arena(device)
    replayed = replayed_on(arena, captured, monkeypatch)

    def called(number: int) -> Tensor:
        device.number = number
        (y,) = replayed([number, torch.arange(4.0)])
        assert isinstance(y, Tensor)
        return y

    for _ in range(3):
        called(200)
    shared_pool(arena).make_room()  # gives the result back
    y = called(200)
    for _ in range(2):  # warm, and a capture that is of no use
        assert called(100).tolist() == [0.0, 100.0, 200.0, 300.0]
    assert y.tolist() == [0.0, 200.0, 400.0, 600.0]
    del y
    for _ in range(5):
        assert called(100).tolist() == [0.0, 100.0, 200.0, 300.0]
    (small,) = [family for family in replayed.families if family.key[0] == (100,)]
    assert [(one.copies, one.is_shared, one.num_replays) for one in small.instances] == [(False, True, 5)]
    assert replayed.fallbacks == {SkipKind.WARM_UP: 2, SkipKind.OUTPUTS_HELD: 1}


def test_one_that_is_always_in_the_way_makes_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    device, captured = GrowingHost(), []
    device.touches_all = True
    arena = Arena(device)
    replayed = replayed_on(arena, captured, monkeypatch)
    device.number = 200
    for _ in range(3):
        replayed([200, torch.arange(4.0)])
    shared_pool(arena).make_room()
    (y,) = replayed([200, torch.arange(4.0)])
    device.number = 100
    for _ in range(10):
        assert replayed([100, torch.arange(4.0)])[0].tolist() == [0.0, 100.0, 200.0, 300.0]
    assert y.tolist() == [0.0, 200.0, 400.0, 600.0]
    assert replayed.fallbacks == {SkipKind.WARM_UP: 2, SkipKind.OUTPUTS_HELD: 3}
    assert captured[-1].copies


def test_a_key_whose_last_capture_failed_is_captured_again_once_its_graphs_are_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device, captured = TellingHost(), []
    arena = Arena(device)
    replayed = replayed_on(arena, captured, monkeypatch)

    def fail() -> None:
        raise torch.OutOfMemoryError("no room")

    def called() -> Tensor:
        (y,) = replayed([2, torch.arange(4.0)])
        assert isinstance(y, Tensor)
        assert y.tolist() == [0.0, 2.0, 4.0, 6.0]
        return y

    called()
    y = called()
    device.during_capture = fail
    called()
    called()
    assert replayed.fallbacks == {SkipKind.WARM_UP: 1, SkipKind.OUTPUTS_HELD: 2}
    device.during_capture = lambda: None
    y.untyped_storage().resize_(0)
    for _ in range(3):
        called()
    assert replayed.fallbacks == {SkipKind.WARM_UP: 1, SkipKind.OUTPUTS_HELD: 2}
