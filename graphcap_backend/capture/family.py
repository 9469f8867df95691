"""All graphs captured for one key: which of them may serve a call, and what the next one is to be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from torch.multiprocessing.reductions import StorageWeakRef

from graphcap_backend.capture.allocator import Range
from graphcap_backend.capture.memory_pool import PoolName
from graphcap_backend.capture.skip import SkipReason

if TYPE_CHECKING:
    from graphcap_backend.capture.instance import Instance


_MOST_SHARED = 8
"""Instances of one key in the shared pool. Results of other keys that are held may be in the way of some."""


class NextInstance(NamedTuple):
    """An instance to be captured."""

    pool: PoolName
    in_place: tuple[int, ...]
    """Inputs that it reads where they are."""


@dataclass(slots=True, eq=False)
class Family:
    """Instances that differ in where their outputs lie, and in the addresses of inputs that they read in place.

    Inputs that other graphs gave as outputs come from few addresses, so the first instances read them there.
    """

    key: tuple[Any, ...]
    static_addresses: list[int]
    """By position among the inputs; 0 for those that are not static."""
    written: tuple[Range, ...] = ()
    """Memory of static inputs that is written to. Inputs that share it cannot be copied in."""
    instances: list[Instance] = field(default_factory=list)
    """In the order in which calls look for an idle one: those that hand out aliases, then those that copy."""
    refused: SkipReason | None = None
    full: bool = False
    """Whether capturing one more instance has failed."""
    num_in_the_way: int = 0
    """Captures that were of no use, since callers held what the graph would have written to."""
    statics: tuple[StorageWeakRef, ...] = ()
    """Storages of the static inputs. Once one is gone, no call can come with this key."""

    def idle_for(self, inputs: Sequence[Any]) -> Instance | None:
        """The first instance that may be replayed with these inputs now."""
        for instance in self.instances:
            if instance.idle() and instance.finds(inputs):
                return instance
        return None

    def next_instance(self, in_place: tuple[int, ...], max_held: int, *, shares: bool) -> NextInstance:
        """What to capture when none is idle.

        Args:
            in_place: inputs that it could.
            max_held: how many take turns, of those that do so and of those that do not; of those that share, of how
                many outputs may be held while one more is captured.
            shares: whether it goes into the shared pool.
        """
        alike = sum(bool(instance.in_place) for instance in self.instances)
        if not in_place or alike >= max_held:
            alike, in_place = len(self.instances) - alike, ()
        if shares:
            # Any two of them may be in each other's way, but each is captured out of the way of what is held then.
            num_held = sum(instance.is_held() for instance in self.instances)
            return NextInstance("shared" if num_held <= max_held and alike < _MOST_SHARED else "copies", in_place)
        if alike >= max_held:
            return NextInstance("copies", in_place)
        return NextInstance(sum(not instance.copies for instance in self.instances), in_place)

    def add(self, instance: Instance) -> None:
        """Take in an instance that was just captured."""
        self.instances.append(instance)
        self.instances.sort(key=lambda one: one.copies)
