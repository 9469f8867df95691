"""One memory pool of captured graphs, and one whose graphs share even the memory of their outputs.

In a plain pool an output's memory is taken for as long as its graph lives. In a shared one it is given back once
nobody holds the output, and graphs captured later may use it for anything. What callers hold at that time is left
out: the allocator knows of the outputs that were never given back, and of the others the capture is told.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Container, Iterable, Sequence
from typing import TYPE_CHECKING, Literal

import torch

from graphcap_backend.capture.allocator import FreeBlock, Range, TouchedMemory, occupy, overlap
from graphcap_backend.capture.process import PROCESS
from graphcap_backend.errors import CaptureError

if TYPE_CHECKING:
    from graphcap_backend.capture.device import Device
    from graphcap_backend.capture.outputs import OwnedOutput

PoolName = int | Literal["shared", "copies"]
"""The pool of the graphs whose outputs are copied, the shared one, or that of the n-th instances of all graphs."""


_FEW = 8
"""Outputs handed out before it is looked which of them are still held."""


class HeldMemoryError(CaptureError):
    """A graph was captured that writes to an output which a caller holds. It must not be replayed."""


class Pool:
    """A pool, alive as long as an instance refers to it."""

    def __init__(self, device: Device) -> None:
        self.token = device.new_pool()
        """What torch takes for it; None on the host."""

    def make_room(self) -> None:
        """Have memory ready for one more capture."""

    def occupy_held(self, touched: TouchedMemory) -> Sequence[torch.UntypedStorage]:
        """Inside a capture: keep it off memory that callers hold, until the answer is dropped."""
        return ()

    def check(self, touched: TouchedMemory) -> None:
        """Raise HeldMemoryError if the graph that was captured into it could overwrite what a caller holds."""


class SharedPool(Pool):
    """A pool that outputs are lent out of.

    Lives as long as an instance refers to it or a caller holds one of its outputs.

    Attributes:
        outputs: of its graphs, and of graphs that are gone if a caller may hold them.
    """

    def __init__(self, device: Device) -> None:
        super().__init__(device)
        self.outputs: list[OwnedOutput] = []
        self._handed_out: dict[OwnedOutput, None] = {}
        """All that a caller may hold: those handed out since they were last seen to be held by nobody."""
        self._looks_at = _FEW
        self._device = device
        self._held: list[Range] = []
        self._free_blocks: list[FreeBlock] = []
        device.retain_pool(self.token, self)

    def hand_out(self, outputs: dict[OwnedOutput, None]) -> None:
        """A caller is about to be given these."""
        self._handed_out.update(outputs)
        if len(self._handed_out) > self._looks_at:
            self._forget_dropped()
            self._handed_out.update(outputs)
            self._looks_at = max(_FEW, 2 * len(self._handed_out))

    def _forget_dropped(self) -> None:
        self._handed_out = {out: None for out in self._handed_out if out.in_use()}

    def holds_any(self, outputs: Container[OwnedOutput]) -> bool:
        """Whether a caller holds one of these. Asked at every replay: what callers hold at a time is little."""
        for out in self._handed_out:  # noqa: SIM110 - any() and its generator would take twice as long
            if out in outputs and out.in_use():
                return True
        return False

    def make_room(self) -> None:
        """Give back what nobody holds, and see what is held that was given back before."""
        self._forget_dropped()
        self.outputs = [out for out in self.outputs if not out.released or out.in_use()]
        for out in self.outputs:
            if out.is_allocated and not out.in_use():
                out.give_back()
        self._held = [out.range for out in self._held_unknown_to_the_allocator()]
        self._free_blocks = self._device.free_blocks(self.token) if self._held else []

    def occupy_held(self, touched: TouchedMemory) -> Sequence[torch.UntypedStorage]:
        return occupy(self._free_blocks, self._held, self._device.torch_device, touched)

    def check(self, touched: TouchedMemory) -> None:
        if not touched.exact or any(
            overlap(out.range, touched.ranges) for out in self._held_unknown_to_the_allocator()
        ):
            raise HeldMemoryError("the graph would write to an output that a caller holds")

    @property
    def num_bytes_held(self) -> int:
        """Bytes of its outputs that callers hold."""
        return sum(out.num_bytes for out in self.outputs if out.in_use())

    def _held_unknown_to_the_allocator(self) -> Iterable[OwnedOutput]:
        return (out for out in self.outputs if not out.is_allocated and out.in_use())

    def lend(self, outputs: Sequence[OwnedOutput], owner: object) -> Callable[[], None]:
        """Take in the outputs of a new graph.

        Returns:
            what to call when the graph is gone; else the end of ``owner`` does. From then on this pool lives as long
            as a caller holds one of the outputs.
        """
        self.outputs.extend(out for out in outputs if out.is_lent)
        end = weakref.finalize(owner, _keep_while_held, self, tuple(outputs))
        end.atexit = False
        return end


def _keep_while_held(pool: SharedPool, outputs: Sequence[OwnedOutput]) -> None:
    def held() -> bool:
        return any(out.in_use() for out in outputs)

    if held():
        PROCESS.keep_while(held, pool)
