"""What captures ask of torch's caching allocator: what they allocated, what a pool has free, how to keep a pool."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

Range = tuple[int, int]
"""Memory from the first address up to, not including, the second."""

_LARGEST_SMALL_BYTES = 1 << 20
"""Of a block in the allocator's segments for small blocks, which requests of more bytes never get."""


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

    def leave_out(self, allocated: Iterable[Tensor]) -> None:
        """These allocations, the first ones inside the block, are none that the graph writes to."""
        self._set_aside.update(range_of(tensor.untyped_storage()) for tensor in allocated)

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
        segments = _segments(snapshot, pool)
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


def free_blocks(pool: Any) -> list[int]:
    """Sizes in bytes of what is free in a pool: requests of these sizes, in this order, get all of it."""
    wanted = tuple(pool)
    sizes = []
    for segment in torch.cuda.memory_snapshot():  # type: ignore[no-untyped-call]
        if tuple(segment["segment_pool_id"]) == wanted:
            largest = _LARGEST_SMALL_BYTES if segment["segment_type"] == "small" else segment["total_size"]
            for block in segment["blocks"]:
                if block["state"] == "inactive":
                    whole, rest = divmod(block["size"], largest)
                    sizes += [largest] * whole + [rest] * bool(rest)
    return sorted(sizes, reverse=True)


def occupy(sizes: Sequence[int], ranges: Sequence[Range], device: torch.device, touched: TouchedMemory) -> list[Tensor]:
    """Allocate what is free in ``ranges`` of the pool that allocations go to now.

    Args:
        sizes: what ``free_blocks`` gave.

    Returns:
        tensors that keep the memory from being allocated for as long as they live.
    """
    everything = [torch.empty(size, dtype=torch.uint8, device=device) for size in sizes]
    touched.leave_out(everything)
    return [tensor for tensor in everything if overlap(range_of(tensor.untyped_storage()), ranges)]


def _segments(snapshot: Any, pool: Any) -> list[Range]:
    wanted = tuple(pool)
    return [
        (segment["address"], segment["address"] + segment["total_size"])
        for segment in snapshot["segments"]
        if tuple(segment["segment_pool_id"]) == wanted
    ]
