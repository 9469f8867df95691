"""The captured keys of one callable, bounded: which goes when there are too many, or when it can serve no more."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator

from graphcap_backend.capture.family import Family
from graphcap_backend.capture.instance import Instance
from graphcap_backend.capture.key_history import Key


class FamilyTable:
    """Families by key, least recently used first. All calls under the lock of their callable.

    Args:
        max_graphs: how many are kept.
        on_full: called before one goes to make room; may raise.

    Attributes:
        current: the family that served the last call, for as long as it is kept.
        num_captured: keys captured so far, those that made room for others included.
        num_replays_released: replays of the graphs that are gone.
    """

    def __init__(self, max_graphs: int, on_full: Callable[[], None]) -> None:
        self.current: Family | None = None
        self.num_captured = 0
        self.num_replays_released = 0
        self._max_graphs = max_graphs
        self._on_full = on_full
        self._families: OrderedDict[Key, Family] = OrderedDict()

    def __len__(self) -> int:
        return len(self._families)

    def __iter__(self) -> Iterator[Family]:
        return iter(tuple(self._families.values()))

    def use(self, key: Key) -> Family | None:
        """The family of a key, which is now the most recently used one."""
        family = self._families.get(key)
        if family is not None:
            self._families.move_to_end(key)
        return family

    def keep(self, family: Family) -> None:
        """Take in a family, releasing the least recently used ones above the limit."""
        if len(self._families) >= self._max_graphs:
            self._on_full()
        self._families[family.key] = family
        while len(self._families) > self._max_graphs:
            self._release(self._families.popitem(last=False)[1])

    def keep_still(self, family: Family) -> None:
        """Take a family in again, without instances, if it was dropped just now."""
        if self.use(family.key) is None:
            family.full = False
            self.keep(family)

    def drop_with(self, key: Key, instance: Instance | None) -> None:
        """Drop the family of a key, if it has this very instance: its graph is about to be reset."""
        family = self._families.get(key)
        if family is not None and instance in family.instances:  # else it is being released already
            self._drop(family)

    def drop_dead(self, addresses: tuple[int, ...]) -> None:
        """Drop families whose static inputs are gone, before one for static inputs at new ``addresses`` comes.

        Weights that are replaced, and models of one class that come and go, would leave their graphs behind.
        """
        if any(family.key[2] == addresses for family in self):
            return  # the same weights in another shape, as at each call of a new shape
        for family in self:
            if any(storage.expired() for storage in family.statics):  # type: ignore[no-untyped-call]
                self._drop(family)

    def drop_others(self, family: Family) -> None:
        """Drop all families but one; their keys are captured anew."""
        for other in self:
            if other is not family:
                self._drop(other)

    def clear(self) -> None:
        """Drop all."""
        for family in self:
            self._drop(family)
        self.current = None

    def _drop(self, family: Family) -> None:
        del self._families[family.key]
        self.num_captured -= bool(family.instances)
        self._release(family)

    def _release(self, family: Family) -> None:
        if self.current is family:
            self.current = None
        for instance in family.instances:
            self.num_replays_released += instance.num_replays
            instance.release()
        family.instances.clear()
