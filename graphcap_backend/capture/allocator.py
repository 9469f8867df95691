"""What captures ask of torch's caching allocator: what they allocated, what a pool has free, how to keep a pool."""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

Range = tuple[int, int]
"""Memory from the first address up to, not including, the second."""

_SMALL_BYTES = 1 << 20
"""Requests of up to so many bytes get memory from segments for small blocks, the others never do."""
_UNIT_BYTES = 512
"""The allocator rounds up to it."""


def range_of(storage: torch.UntypedStorage) -> Range:
    """The memory of a storage."""
    address = storage.data_ptr()
    return address, address + storage.nbytes()


def overlap(one: Range, ranges: Iterable[Range]) -> bool:
    """Whether ``one`` has memory in common with any of ``ranges``."""
    return any(one[0] < last and first < one[1] for first, last in ranges)


@dataclass(slots=True)
class TouchedMemory:
    """What a capture allocated from its pool, freed since or not: all that its graph may write to there.

    Attributes:
        ranges: of each allocation.
        exact: whether only that; else ``ranges`` are all that the pool has: more than was touched, never less.
        pool_bytes: size of the pool.
    """

    history_lock: ClassVar[threading.Lock] = threading.Lock()  # captures on several devices share the one history

    ranges: list[Range] = field(default_factory=list)
    exact: bool = True
    pool_bytes: int = 0
    _set_aside: Counter[Range] = field(default_factory=Counter)

    def leave_out(self, storage: torch.UntypedStorage) -> None:
        """This allocation, the last one so far, is none that the graph writes to."""
        self._set_aside[range_of(storage)] += 1

    @property
    def num_bytes(self) -> int:
        """Bytes touched, each counted once."""
        total, end = 0, 0
        for first, last in sorted(self.ranges):
            total += max(0, last - max(first, end))
            end = max(end, last)
        return total

    def read(self, snapshot: Any, device_index: int, pool: Any, *, exact: bool) -> None:
        """Take the answer from the allocator's history."""
        segments = [
            (segment["address"], segment["address"] + segment["total_size"])
            for segment in segments_of(snapshot["segments"], pool)
        ]
        self.exact, self.pool_bytes = exact, sum(last - first for first, last in segments)
        if not exact:
            self.ranges.extend(segments)
            return
        for event in snapshot["device_traces"][device_index]:
            if event["action"] != "alloc":
                continue
            one = event["addr"], event["addr"] + event["size"]
            if self._set_aside[one]:
                self._set_aside[one] -= 1
            elif overlap(one, segments):
                self.ranges.append(one)


@contextlib.contextmanager
def touched_memory(pool: Any, device_index: int) -> Iterator[TouchedMemory]:
    """Gives an object that tells, on leaving, what was allocated from ``pool`` inside the block.

    The allocator's own history tells. Where somebody else records it, or stopped it meanwhile, theirs is left
    alone, and the answer is not exact.
    """
    touched = TouchedMemory()
    with _own_workspaces():
        with TouchedMemory.history_lock:
            recorded_by_others = not can_tell_what_is_touched()
            if not recorded_by_others:
                record = torch.cuda.memory._record_memory_history
                record("all", context=None, stacks="python", clear_history=True)
        try:
            yield touched
            exact = not recorded_by_others and torch._C._cuda_isHistoryEnabled()
            snapshot = torch.cuda.memory._snapshot()
        finally:
            if not recorded_by_others:
                torch.cuda.memory._record_memory_history(None)
    touched.read(snapshot, device_index, pool, exact=exact)


def can_tell_what_is_touched() -> bool:
    """Whether nobody else has the allocator's history recorded."""
    return not torch._C._cuda_isHistoryEnabled()


def gives_what_is_asked_for() -> bool:
    """Whether a request of a free block's size gets such a block, and of less a part of one.

    Not with settings under which the allocator rounds requests up, or divides no large blocks.
    """
    settings = os.environ.get("PYTORCH_ALLOC_CONF", "") + os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
    return "roundup_power2_divisions" not in settings and "max_split_size_mb" not in settings


@contextlib.contextmanager
def _own_workspaces() -> Iterator[None]:
    """cuBLAS allocates its workspaces inside the block, and keeps none that it allocated there.

    It holds on to a workspace until somebody clears them all, as ``mode="reduce-overhead"`` does. One that an
    earlier capture left in its pool would be written to by this graph, too, and nobody would know.
    """
    torch._C._cuda_clearCublasWorkspaces()
    try:
        yield
    finally:
        torch._C._cuda_clearCublasWorkspaces()


def retain_pool(pool: Any, device_index: int, owner: object) -> None:
    """Keep the pool's memory from being given up for as long as ``owner`` lives, whatever graphs it has then."""
    # Beginning to allocate takes a share in the pool, which ending does not return.
    torch._C._cuda_beginAllocateCurrentThreadToPool(device_index, pool)
    torch._C._cuda_endAllocateToPool(device_index, pool)
    weakref.finalize(owner, torch._C._cuda_releasePool, device_index, pool).atexit = False


@dataclass(frozen=True, slots=True)
class FreeBlock:
    """Memory that a pool has free, for allocations of one stream."""

    stream: int
    range: Range
    is_large: bool
    """Whether requests of more than 1 MiB get it, and no others."""


def free_blocks(pool: Any) -> list[FreeBlock]:
    """What is free in a pool."""
    return [
        FreeBlock(
            stream=segment["stream"],
            range=(block["address"], block["address"] + block["size"]),
            is_large=segment["segment_type"] == "large",
        )
        for segment in segments_of(torch.cuda.memory_snapshot(), pool)  # type: ignore[no-untyped-call]
        for block in segment["blocks"]
        if block["state"] == "inactive"
    ]


def occupy(
    blocks: Sequence[FreeBlock], ranges: Sequence[Range], device: torch.device, touched: TouchedMemory
) -> list[torch.UntypedStorage]:
    """Inside a capture: allocate what is free in ``ranges`` of the pool that allocations go to now.

    First all that is free, largest first, so that each request gets a block of its size. Then each large block that is
    wanted in part is given back and, the only free one, allocated in parts. In the end the rest is given back.

    Args:
        blocks: what ``free_blocks`` gave.

    Returns:
        storages that keep the memory from being allocated for as long as they live.
    """
    if not blocks:
        return []
    stream = torch.cuda.current_stream(device).cuda_stream
    blocks = [block for block in blocks if block.stream == stream]

    def allocate(num_bytes: int) -> torch.UntypedStorage:
        # A tensor would be filled where torch.use_deterministic_algorithms() is on: at each replay.
        storage = torch.UntypedStorage(num_bytes, device=device)  # type: ignore[no-untyped-call]
        touched.leave_out(storage)
        return storage

    whole = {range_of(storage): storage for storage in map(allocate, requests(blocks))}
    held: list[torch.UntypedStorage] = []
    spare: list[torch.UntypedStorage] = []
    for block in blocks:
        parts = divided(block.range, ranges)
        if block.is_large and len(parts) > 1 and whole.pop(block.range, None) is not None:
            for (first, last), is_wanted in parts:
                (held if is_wanted else spare).append(allocate(last - first))
    return held + [storage for one, storage in whole.items() if overlap(one, ranges)]


def requests(blocks: Iterable[FreeBlock]) -> list[int]:
    """Sizes in bytes of requests that, in this order, get all of ``blocks`` that can be had."""
    sizes = []
    for block in blocks:
        num_bytes = block.range[1] - block.range[0]
        if block.is_large and num_bytes <= _SMALL_BYTES:
            continue  # with expandable segments; no request gets it
        largest = num_bytes if block.is_large else _SMALL_BYTES
        sizes += [largest] * (num_bytes // largest) + [num_bytes % largest] * bool(num_bytes % largest)
    return sorted(sizes, reverse=True)


def divided(block: Range, ranges: Iterable[Range]) -> list[tuple[Range, bool]]:
    """A large block in parts, and which of them cover ``ranges``.

    The allocator divides such a block only if more than 1 MiB is left on both sides.
    """
    least = _SMALL_BYTES + _UNIT_BYTES
    at, end = block
    parts = []
    for wanted in sorted(one for one in ranges if overlap(one, [block])):
        if wanted[1] <= at:
            continue
        first = min(wanted[0] // _UNIT_BYTES * _UNIT_BYTES, end - least)
        if first - at >= least:
            parts.append(((at, first), False))
            at = first
        last = max(-(-wanted[1] // _UNIT_BYTES) * _UNIT_BYTES, at + least)
        if end - last < least:
            last = end
        if at < last:
            parts.append(((at, last), True))
        at = last
        if at == end:
            return parts
    return [*parts, ((at, end), False)]


def segments_of(segments: Iterable[Mapping[str, Any]], *pools: Any) -> list[Mapping[str, Any]]:
    """Of the segments of a memory snapshot, those that belong to one of ``pools``, which are tokens."""
    wanted = set(map(tuple, pools))
    return [segment for segment in segments if tuple(segment["segment_pool_id"]) in wanted]
