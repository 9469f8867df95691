"""A host that tells which memory a capture touched, and what is captured there.

No host graph writes to another's memory: the tests say which memory a graph is to be taken to have touched.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from helpers.two_streams import StreamedHost
from torch import Tensor

from graphcap_backend.capture.allocator import FreeBlock, Range, TouchedMemory
from graphcap_backend.capture.arena import Arena
from graphcap_backend.capture.callee import Callee, ReplayLimits
from graphcap_backend.capture.inputs import assign_roles
from graphcap_backend.capture.instance import Instance
from graphcap_backend.capture.memory_pool import PoolName, SharedPool
from graphcap_backend.capture.replay import Replayed

CPU = torch.device("cpu")
MIB = 1 << 20
EVERYTHING: Range = (1, 1 << 62)


class TellingHost(StreamedHost):
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


class GrowingHost(TellingHost):
    """Each key's graphs need as many MiB as its number says, and the pool is a third larger than the largest."""

    number = 0
    touches_all = False
    """Whether they write to everything all the same."""

    @contextlib.contextmanager
    def touched_memory(self, pool: Any) -> Iterator[TouchedMemory]:
        self.touches = [(1 << 40, (1 << 40) + self.number * MIB)]
        self.pool_bytes = self.number * MIB * 4 // 3 + 20 * MIB
        if self.touches_all:
            self.touches.append(EVERYTHING)
        with super().touched_memory(pool) as touched:
            yield touched

    def may_share_outputs(self) -> bool:
        return True


def double(inputs: list[Any]) -> Sequence[Any]:
    (x,) = inputs
    inputs.clear()
    return [x * 2]


def views(inputs: list[Any]) -> Sequence[Any]:
    (x,) = inputs
    inputs.clear()
    y = x * 2
    return [y, y[2:], y.view(2, 2).t(), x[:0] * 2]


def nothing(inputs: list[Any]) -> Sequence[Any]:
    inputs.clear()
    return []


def instance_of(
    arena: Arena, run: Callable[[list[Any]], Sequence[Any]] = double, pool: PoolName = "shared"
) -> Instance:
    x = torch.ones(4)
    return Instance(run, [x], assign_roles([x], (), (), CPU), arena=arena, pool=pool)


def call(instance: Instance) -> Tensor:
    result = instance.replay([torch.arange(4.0)])[0]
    assert isinstance(result, Tensor)
    return result


def shared_pool(arena: Arena) -> SharedPool:
    pool = arena.pool("shared")
    assert isinstance(pool, SharedPool)
    return pool


def replayed_on(arena: Arena, captured: list[Instance], monkeypatch: pytest.MonkeyPatch) -> Replayed:
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
