"""One device's memory pools, shared by all graphs that the backend captures there.

Graphs of one pool reuse each other's memory: an output of a later graph may lie where an earlier
graph keeps its intermediates. So a graph may be replayed only while no output is in use that lies in
memory it writes to; the arena tells each instance which outputs those are (``Instance.watch``).

There is a pool for each turn: instances of one graph that serve by turns must not touch each other's
outputs, and within one pool the next one puts its output where the last one had an intermediate. Graphs that
need much memory are worth the search for instances that get along in one pool (``memory_pool.SharedPool``).
A pool of its own serves graphs whose outputs are copied: nothing in it outlives a replay, so nothing is watched.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from graphcap_backend.capture.allocator import overlap
from graphcap_backend.capture.device import Device, device_for
from graphcap_backend.capture.memory_pool import Pool, PoolName, SharedPool

if TYPE_CHECKING:
    from graphcap_backend.capture.instance import Instance
    from graphcap_backend.capture.outputs import OwnedOutput


_LOOSE_BYTES, _LOOSE_SHARE = 16 << 20, 0.25
"""A shared pool is packed anew for so many unused bytes, and for such a share of what its largest graph needs."""


class Arena:
    """The pools of one device, the lock round it, and the instances captured into it.

    Lives as long as a captured callable refers to it; ``Arena.of`` only remembers it weakly.
    """

    _of_device: ClassVar[weakref.WeakValueDictionary[torch.device, Arena]] = weakref.WeakValueDictionary()
    _table_lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, device: Device) -> None:
        self.device = device
        # Re-entrant: an uncaptured run below a captured one may come back here on the same thread.
        self.lock = threading.RLock()
        self.last_stream: int | None = None
        self._first_stream: int | None = None
        self.several_streams = False
        """Whether graphs were ever replayed on more than one stream; only then is there anything to order."""
        self.streams_left: set[int | None] = set()
        """Where callers were given outputs that no graph watches any more, since the last replay."""
        self.gone: deque[list[tuple[OwnedOutput, int]]] = deque()
        """What graphs that died without being released held of others' outputs; see ``settle``."""
        self._pools: weakref.WeakValueDictionary[PoolName, Pool] = weakref.WeakValueDictionary()
        self._instances: weakref.WeakSet[Instance] = weakref.WeakSet()
        self._num_shared = 0
        self._num_dropped = 0
        """Of those captured into the shared pool: graphs dropped to pack it anew."""

    @classmethod
    def of(cls, device: torch.device) -> Arena:
        """The arena of ``device``, made when there is none."""
        with cls._table_lock:
            arena = cls._of_device.get(device)
            if arena is None:
                arena = cls._of_device[device] = cls(device_for(device))
            return arena

    def pool(self, name: PoolName) -> Pool:
        """The pool of that name, which lives as long as an instance that was captured into it."""
        pool = self._pools.get(name)
        if pool is None:
            pool = self._pools[name] = (SharedPool if name == "shared" else Pool)(self.device)
        return pool

    def order(self, instance: Instance) -> bool:
        """Order the current stream behind all that a replay of ``instance`` could disturb.

        That is the last replay, whose intermediates may lie in the same memory, and whatever callers did with the
        outputs that it overwrites: they may have used those on another stream, and dropped them, since. False, and
        nothing done, if such a stream is being captured: waiting for it would become part of that capture.
        """
        stream = self.device.current_stream()
        if self.last_stream is None:
            self.last_stream = self._first_stream = stream
        self.several_streams |= stream != self.last_stream
        if self.several_streams:
            given = instance.streams() | self.streams_left
            handed_out = {self._first_stream if other is None else other for other in given}
            others = [other for other in {self.last_stream, *handed_out} if other is not None and other != stream]
            if any(map(self.device.is_captured, others)):
                return False
            for other in others:
                self.device.wait_for_stream(other)
            self.streams_left.clear()
            instance.handed_out_on(stream)
            self.last_stream = stream
        return True

    def add(self, instance: Instance) -> None:
        """A new instance: no graph must be replayed while outputs of another in memory that it writes to are in use."""
        for earlier in self._instances:
            earlier.unwatch_released()
            earlier.watch([out for out in instance.owned if overlap(out.range, earlier.touched.ranges)])
            given_back = [out for out in earlier.owned if not out.is_allocated]
            instance.watch([out for out in given_back if overlap(out.range, instance.touched.ranges)])
        self._num_shared += instance.is_shared
        self._instances.add(instance)

    def is_loose(self, newest: Instance) -> bool:
        """Whether the shared pool would be much smaller, had ``newest``, its largest graph, been captured first.

        Graphs find room where larger ones have theirs, never the other way round.
        """
        pool = self._pools.get("shared")
        if not newest.is_shared or not isinstance(pool, SharedPool):
            return False
        others = [instance for instance in self._instances if instance.is_shared and instance is not newest]
        needed = newest.touched.num_bytes
        unused = newest.touched.pool_bytes - needed - pool.num_bytes_held
        largest = max((instance.touched.num_bytes for instance in others), default=needed)
        worth_it = unused >= max(_LOOSE_BYTES, needed * _LOOSE_SHARE)
        # Each graph is captured three times at most, on the whole.
        few_captures = self._num_dropped + len(others) <= 2 * (self._num_shared - self._num_dropped)
        return needed > largest and worth_it and few_captures

    def drop_shared(self) -> None:
        """Drop the graphs of the shared pool, and the pool: keys are captured anew, into another, at their next call.

        What callers hold stays valid, and keeps the memory of the pool. The graph that this is for, released before, is
        captured again as well.
        """
        self._num_dropped += 1
        for instance in [instance for instance in self._instances if instance.is_shared]:
            self._num_dropped += 1
            instance.drop()
        self._pools.pop("shared", None)

    def drop_resized(self) -> bool:
        """Drop graphs whose output somebody resized: its storage has other memory now, or none. Whether any were."""
        resized = [one for one in self._instances if any(out.is_resized for out in one.owned)]
        for instance in resized:
            instance.drop(resized=True)
        return bool(resized)

    def owns(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` is an output of a graph of this arena, whose address is there to stay."""
        return bool(self.owned_by_graphs([tensor]))

    def own_among(self, inputs: Sequence[Any], indices: Sequence[int]) -> tuple[int, ...]:
        """Which of the inputs at ``indices`` are outputs of this arena's graphs."""
        return tuple(i for i in indices if self.owns(inputs[i]))

    def owned_by_graphs(self, tensors: Sequence[Tensor]) -> list[OwnedOutput]:
        """The outputs of this arena's graphs among ``tensors``."""
        storages = {tensor.untyped_storage()._cdata for tensor in tensors}
        return [out for instance in self._instances for out in instance.owned if out.storage in storages]

    def adjust_baselines(self, changes: Sequence[tuple[OwnedOutput, int]]) -> None:
        """Count holders that are graphs, not callers, as part of the idle state (or no longer)."""
        if any(change for _, change in changes):
            for out, change in changes:
                out.raise_baseline(change)
            for instance in self._instances:
                instance.refresh_probes()

    def settle(self) -> None:
        """Count what dead graphs held no longer. (A finalizer cannot: the lock may be another thread's.)"""
        while self.gone:
            self.adjust_baselines([(out, -held) for out, held in self.gone.popleft()])

    def forget(self, instance: Instance) -> None:
        """The instance is released. Others go on watching those of its outputs that a caller still holds."""
        self._instances.discard(instance)
        self.streams_left.update(instance.streams())
        for out in instance.owned:
            out.release()
        for other in self._instances:
            other.unwatch_released()
