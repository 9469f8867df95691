"""Occupying held memory, against a model of a pool of torch's caching allocator (without expandable segments).

The model has what decides where an allocation lies: segments of two kinds, best fit, what is divided, what merges.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from graphcap_backend.capture import allocator
from graphcap_backend.capture.allocator import FreeBlock, Range, TouchedMemory, occupy, overlap, range_of

MIB = 1 << 20
POOL = (0, 7)
OURS, THEIRS = 3, 4
"""Streams: of the capture, and another one whose allocations lie in the same pool."""


class ModelPool:
    """Segments of blocks, by address: [first, last, stream, is_large, is_free]."""

    def __init__(self) -> None:
        self.segments: list[list[list[Any]]] = []
        self.events: list[dict[str, Any]] = []
        self._end = 1 << 32

    def allocate(self, num_bytes: int, stream: int) -> list[Any]:
        size = -(-num_bytes // 512) * 512
        is_large = size > MIB
        fits = [
            (block[1] - block[0], block[0], segment)
            for segment in self.segments
            for block in segment
            if block[2:] == [stream, is_large, True] and block[1] - block[0] >= size
        ]
        if not fits:
            whole = 2 * MIB if not is_large else 20 * MIB if size < 10 * MIB else -(-size // (2 * MIB)) * 2 * MIB
            self.segments.append([[self._end, self._end + whole, stream, is_large, True]])
            fits = [(whole, self._end, self.segments[-1])]
            self._end += whole
        found, first, segment = min(fits, key=lambda fit: fit[:2])
        at, block = next((at, block) for at, block in enumerate(segment) if block[0] == first)
        rest = found - size
        if rest > MIB if is_large else rest >= 512:
            segment.insert(at + 1, [first + size, block[1], stream, is_large, True])
            block[1] = first + size
        block[4] = False
        self.events.append({"action": "alloc", "addr": first, "size": num_bytes})
        return block

    def free(self, block: list[Any]) -> None:
        block[4] = True
        self.events.append({"action": "free_completed", "addr": block[0], "size": block[1] - block[0]})
        segment = next(segment for segment in self.segments if any(block is one for one in segment))
        for at in range(len(segment) - 1, 0, -1):
            if segment[at][4] and segment[at - 1][4]:
                segment[at - 1][1] = segment.pop(at)[1]

    def free_blocks(self) -> list[FreeBlock]:
        blocks = (block for segment in self.segments for block in segment)
        return [FreeBlock(stream, (first, last), large) for first, last, stream, large, is_free in blocks if is_free]

    def snapshot(self) -> dict[str, Any]:
        ends = [(segment[0][0], segment[-1][1] - segment[0][0]) for segment in self.segments]
        segments = [{"address": first, "total_size": size, "segment_pool_id": POOL} for first, size in ends]
        return {"segments": segments, "device_traces": [self.events]}


class Storage:
    """Memory of a pool, taken for as long as this lives."""

    def __init__(self, pool: ModelPool, num_bytes: int, stream: int = OURS) -> None:
        self._pool, self._num_bytes, self._block = pool, num_bytes, pool.allocate(num_bytes, stream)

    def data_ptr(self) -> int:
        return int(self._block[0])

    def nbytes(self) -> int:
        return self._num_bytes

    def __del__(self) -> None:
        self._pool.free(self._block)


_range: Callable[[Any], Range] = range_of


def _size(rng: random.Random) -> int:
    edges = (1, 511, 512, 513, MIB - 1, MIB, MIB + 1, MIB + 512, 2 * MIB, 10 * MIB - 1, 10 * MIB, 20 * MIB)
    return rng.choice([rng.choice(edges), rng.randint(1, 4096), rng.randint(1, MIB), rng.randint(MIB, 40 * MIB)])


def _used_pool(rng: random.Random) -> tuple[ModelPool, list[Storage], list[Range]]:
    """A pool with a past, what is still allocated of it, and some that was given back and is held again."""
    pool, live = ModelPool(), list[Storage]()
    past, held = list[Range](), list[Range]()
    for _ in range(rng.randint(2, 60)):
        if live and rng.random() < 0.45:
            past.append(_range(live.pop(rng.randrange(len(live)))))
        else:
            live.append(Storage(pool, _size(rng), rng.choice([OURS, OURS, OURS, THEIRS])))
    for one in rng.sample(past, len(past)):
        if len(held) < rng.choice([1, 2, 5]) and not overlap(one, held):
            held.append(one)
    return pool, live, held


def test_no_allocation_meets_what_is_held_and_all_else_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = SimpleNamespace(current_stream=lambda device: SimpleNamespace(cuda_stream=OURS))
    for seed in range(1200):
        rng = random.Random(seed)
        pool, live, held = _used_pool(rng)
        free, num_segments, touched = pool.free_blocks(), len(pool.segments), TouchedMemory()
        pool.events.clear()

        made = SimpleNamespace(UntypedStorage=lambda size, device, of=pool: Storage(of, size), cuda=stream)
        with monkeypatch.context() as patch:
            patch.setattr(allocator, "torch", made)
            occupied: list[Any] = list(occupy(free, held, torch.device("cpu"), touched))
        assert len(pool.segments) == num_segments, f"{seed}: the pool grew"
        assert not any(block.stream == OURS and overlap(block.range, held) for block in pool.free_blocks()), seed
        for one in map(_range, occupied):
            inside = [min(last, one[1]) - max(first, one[0]) for first, last in held if overlap((first, last), [one])]
            assert inside, f"{seed}: occupied for nothing"
            assert one[1] - one[0] - sum(inside) <= 3 * MIB, f"{seed}: much beside it"

        run: list[Storage] = []
        expected: list[Range] = []
        for _ in range(40):
            if run and rng.random() < 0.4:
                run.pop(rng.randrange(len(run)))
                continue
            run.append(Storage(pool, _size(rng)))
            expected.append(_range(run[-1]))
            assert not overlap(expected[-1], held), seed
        touched.read(pool.snapshot(), 0, POOL, exact=True)
        assert touched.ranges == expected, f"{seed}: what was set aside counts as touched, or the other way round"

        run.clear()
        occupied.clear()
        del pool.segments[num_segments:]  # those that the run added
        assert pool.free_blocks() == free, f"{seed}: taken for good"
        live.clear()
