"""Who may still use what a replay overwrites: outputs of graphs that are gone, users on other streams."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import pytest
import torch
from helpers.two_streams import StreamedHost
from torch import Tensor

from graphcap_backend import SkippedError
from graphcap_backend.capture.arena import Arena
from graphcap_backend.capture.callee import Callee, ReplayLimits
from graphcap_backend.capture.input_copies import InputCopy, SourceRefusedError
from graphcap_backend.capture.inputs import assign_roles
from graphcap_backend.capture.instance import Instance
from graphcap_backend.capture.outputs import OwnedOutput
from graphcap_backend.capture.replay import Replayed
from graphcap_backend.capture.skip import SkipKind, SkipReason

CPU = torch.device("cpu")


def _double(inputs: list[Any]) -> Sequence[Any]:
    (x,) = inputs
    inputs.clear()
    return [x * 2]


def _instance(arena: Arena, x: Tensor) -> Instance:
    return Instance(_double, [x], assign_roles([x], (), (), CPU), arena=arena)


class _Graph:
    """Hands out one output, as a CUDA graph does: its own tensor is all that holds the memory."""

    def __init__(self) -> None:
        self.own = [torch.ones(4)]
        self.owned = OwnedOutput(self.own, self)
        self.owned.set_baseline()


@pytest.mark.parametrize("say_so", [True, False], ids=["released", "dropped"])
def test_output_held_beyond_its_graph_is_still_seen(say_so: bool) -> None:
    arena = Arena(StreamedHost())
    earlier, later = _instance(arena, torch.ones(4)), _Graph()
    # On a GPU the arena finds that the later output lies in memory that the earlier graph writes to.
    earlier.watch([later.owned])
    y = later.own[0].detach()
    assert not earlier.idle()

    if say_so:
        later.owned.release()
    del later
    earlier.unwatch_released()
    assert not earlier.idle(), "the caller still holds the output"

    del y
    assert earlier.idle()
    assert len(earlier._watched) == 2
    earlier.unwatch_released()
    assert len(earlier._watched) == 1  # its own output only: nothing of the other graph is kept


def test_replay_waits_for_the_stream_that_its_outputs_were_handed_out_on() -> None:
    device = StreamedHost()
    arena, x = Arena(device), torch.ones(4)
    first, second = _instance(arena, x), _instance(arena, x)
    for _ in range(3):
        arena.order(first)
    assert device.waits == []  # one stream orders itself

    device.now = 7
    arena.order(second)
    assert device.waits == [(7, 0)]  # behind the last replay
    device.waits.clear()
    # A caller on stream 0 has used and dropped the first one's output since.
    arena.order(first)
    assert device.waits == [(7, 0)]
    device.waits.clear()
    arena.order(first)
    assert device.waits == []  # it is stream 7's now
    device.now = 0
    arena.order(second)
    assert device.waits == [(0, 7)]


def _replayed(on_skip: Callable[[SkipReason], None], run: Callable[[list[Any]], Sequence[Any]] = _double) -> Replayed:
    callee = Callee(run=run, name="double", device=CPU)
    return Replayed(callee, limits=ReplayLimits(), annotations=None, on_skip=on_skip)


def test_a_refusal_that_raises_does_so_at_every_call_before_anything_runs() -> None:
    def refuse(reason: SkipReason) -> None:
        raise SkippedError(str(reason))

    def draw(inputs: list[Any]) -> Sequence[Any]:
        (generator,) = inputs
        inputs.clear()
        return [torch.rand(2, generator=generator)]

    replayed = _replayed(refuse, draw)
    generator = torch.Generator().manual_seed(3)
    for _ in range(3):
        with pytest.raises(SkippedError, match=r"torch\.Generator"):
            replayed([generator])
    assert replayed.refused is not None
    assert torch.equal(torch.rand(2, generator=generator), torch.rand(2, generator=torch.Generator().manual_seed(3)))


def test_a_failed_capture_holds_no_pool() -> None:
    kept: list[Exception] = []

    def fail(inputs: list[Any]) -> Sequence[Any]:
        try:
            raise RuntimeError("no")
        except RuntimeError as error:
            kept.append(error)
            raise

    arena, x = Arena(StreamedHost()), torch.ones(4)
    with pytest.raises(RuntimeError, match="no"):
        Instance(fail, [x], assign_roles([x], (), (), CPU), arena=arena)
    assert kept  # and with it the frames of the capture
    assert not arena._pools


@pytest.mark.parametrize(("one", "other"), [(0.0, -0.0), (1.0, 1.5)])
def test_host_scalars_that_compute_differently_have_keys_of_their_own(one: float, other: float) -> None:
    roles = assign_roles([torch.tensor(one)], (), (), torch.device("cuda", 0))
    assert roles.host_scalars == (0,)
    assert roles.variable_key([torch.tensor(one)]) != roles.variable_key([torch.tensor(other)])
    nan = torch.tensor(float("nan"))
    assert roles.variable_key([nan]) == roles.variable_key([nan.clone()])


@pytest.mark.parametrize(
    ("listed", "sizes", "expected"),
    [
        (None, (3, 5), True),
        ((3, 5), (3, 5), True),
        ((3, 5), (3, 3), True),
        ((3, 5), (3, 4), False),
        ((), (3,), False),
        ((), (), True),
        (((8, 128), (16, 128)), (128, 8), True),
        (((8, 128), (16, 128)), (8,), True),  # another subgraph has the other size
        (((8, 128), (16, 64)), (8, 64), False),
        (((8, 128),), (8, 8), False),
        (((8, 8),), (8, 8), True),
        (((8, 128),), (), True),  # nothing varies
    ],
)
def test_listed_sizes(listed: Any, sizes: tuple[int, ...], expected: bool) -> None:
    assert ReplayLimits(capture_sizes=listed).lists(sizes) is expected


def test_graphs_that_take_turns_count_as_one_shape() -> None:
    def add(inputs: list[Any]) -> Sequence[Any]:
        number, x = inputs
        inputs.clear()
        return [x + number]

    callee = Callee(run=add, name="add", device=CPU)
    replayed = Replayed(callee, limits=ReplayLimits(max_graphs=3), annotations=None, on_skip=lambda reason: None)
    for number in range(3):
        held = [replayed([number, torch.ones(2)])[0] for _ in range(5)]  # two that take turns, and one that copies
        assert all(torch.equal(y, torch.full((2,), 1.0 + number)) for y in held)
    assert [len(family.instances) for family in replayed.families] == [3, 3, 3]
    assert replayed.notices == ()


def test_a_number_that_keeps_changing_is_refused_at_every_call_from_the_fourth_on() -> None:
    def refuse(reason: SkipReason) -> None:
        raise SkippedError(str(reason))

    def scale(inputs: list[Any]) -> Sequence[Any]:
        number, x = inputs
        inputs.clear()
        return [x * number]

    replayed, x = _replayed(refuse, scale), torch.ones(2)
    for number in (0.5, 1.5, 2.5):
        assert replayed([number, x])[0].tolist() == [number] * 2
    for number in (3.5, 3.5, 4.5):  # one that was refused has not run: it is not captured the next time
        with pytest.raises(SkippedError, match="differs from call to call"):
            replayed([number, x])
    assert replayed([1.5, x])[0].tolist() == [1.5, 1.5]
    assert replayed.num_replays == 1
    assert [notice.kind for notice in replayed.notices] == ["changing_number"]


class _Capturing(StreamedHost):
    """Somebody captures stream 0."""

    @staticmethod
    def is_captured(stream: int) -> bool:
        return stream == 0


def test_a_call_that_would_wait_for_a_captured_stream_runs_uncaptured(monkeypatch: pytest.MonkeyPatch) -> None:
    device, x = _Capturing(), torch.ones(4)
    arena = Arena(device)
    monkeypatch.setitem(Arena._of_device, CPU, arena)  # type: ignore[arg-type]
    replayed = _replayed(lambda reason: None)
    for _ in range(3):
        replayed([x])
    device.now = 7
    assert replayed([x])[0].tolist() == [2.0] * 4
    assert device.waits == []
    assert replayed.fallbacks == {SkipKind.WARM_UP: 1, SkipKind.STREAM_CAPTURED: 1}
    device.now = 0
    assert replayed([x])[0].tolist() == [2.0] * 4
    assert replayed.num_replays == 3


class _Refusing(StreamedHost):
    """Graphs here copy their inputs by nodes, and the driver takes another source for them no more than once."""

    copies_inside = True

    def capture_input_copies(
        self, graph: Any, inputs: Sequence[Any], buffers: dict[int, Tensor], where: str | None
    ) -> list[InputCopy]:
        return [cast(InputCopy, _RefusingCopy(i, buffer)) for i, buffer in buffers.items() if self.copies_inside]


class _RefusingCopy:
    def __init__(self, index: int, buffer: Tensor) -> None:
        self.index, self.source, self._buffer = index, 0, buffer

    def read_from(self, tensor: Tensor) -> None:
        if self.source:
            raise SourceRefusedError("cuGraphExecMemcpyNodeSetParams", "CUDA_ERROR_INVALID_VALUE")
        self.source = tensor.data_ptr()
        self._buffer.copy_(tensor)


@pytest.mark.parametrize("held", [False, True])
def test_an_input_that_a_node_cannot_read_is_copied_before_the_replay(
    held: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    device, kept = _Refusing(), []
    arena = Arena(device)
    monkeypatch.setitem(Arena._of_device, CPU, arena)  # type: ignore[arg-type]
    replayed = _replayed(lambda reason: None)
    for number in range(6):
        x = torch.full((4,), float(number))
        (y,) = replayed([x])
        assert y.tolist() == [2.0 * number] * 4
        kept.append((x, y if held else None))  # no input comes at the address of an earlier one
    assert not device.copies_inside
    assert replayed.fallbacks == {SkipKind.WARM_UP: 1}
    assert replayed.num_replays == 5
