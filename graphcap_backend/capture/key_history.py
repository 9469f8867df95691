"""Which keys one callable was called with, and so which are worth a capture."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from graphcap_backend.capture.skip import SkipKind, SkipReason

if TYPE_CHECKING:
    from graphcap_backend.capture.callee import Callee, ReplayLimits

Key = tuple[tuple[Any, ...], tuple[Any, ...], tuple[int, ...]]
"""Values of inputs that are no tensors, layouts of those that are copied, addresses of the static ones."""

_WARM_KEYS_PER_GRAPH = 4
_CHANGING_NUMBERS = 4


class KeyHistory:
    """Keys met so far, bounded. A key is captured at its second call; what stands against that is told.

    ``on_skip`` hears of it at each call concerned, before anything runs or changes: it may raise.

    Attributes:
        notices: what was told, once for each kind.
    """

    def __init__(self, limits: ReplayLimits, callee: Callee, on_skip: Callable[[SkipReason], None]) -> None:
        self.notices: list[SkipReason] = []
        self._limits = limits
        self._callee = callee
        self._on_skip = on_skip
        self._warm: OrderedDict[Key, None] = OrderedDict()
        """Keys that ran once."""
        self._last_addresses: OrderedDict[tuple[Any, ...], tuple[int, ...]] = OrderedDict()

    def add_warm(self, key: Key) -> None:
        """The callable ran, or is about to, with this key."""
        self._warm[key] = None
        while len(self._warm) > _WARM_KEYS_PER_GRAPH * self._limits.max_graphs:
            self._warm.popitem(last=False)

    def clear(self) -> None:
        """Keys have another meaning from now on."""
        self._warm.clear()
        self._last_addresses.clear()

    def last_addresses(self, key: Key) -> tuple[int, ...] | None:
        """Static addresses of the last call that differed from this one in nothing else; None if there was none."""
        last = self._last_addresses.get(key[:2])
        self._last_addresses[key[:2]] = key[2]
        while len(self._last_addresses) > self._limits.max_graphs:
            self._last_addresses.popitem(last=False)
        return last

    def not_yet(self, key: Key, sizes: tuple[int, ...], *, num_captured: int, num_ever: int) -> SkipKind | None:
        """Why a key that has no graphs gets none at this call, or None when it is to be captured.

        Args:
            sizes: what ``capture_sizes`` is about.
            num_captured: keys captured now.
            num_ever: keys captured so far, released ones included.
        """
        if not self._limits.lists(sizes):
            # Listed in the report, but not said: it is as the user wants it.
            self._note(SkipKind.SIZE_NOT_LISTED, f"was called with sizes {sizes}, which capture_sizes does not list")
            return SkipKind.SIZE_NOT_LISTED
        if key not in self._warm:
            self._say_what_keeps_changing(key, num_captured)
            self.add_warm(key)
            return SkipKind.WARM_UP
        if num_ever >= 2 * self._limits.max_graphs:
            # Keys come and go faster than graphs pay for their capture.
            self.say_too_many("no more shapes are captured")
            return SkipKind.TOO_MANY_SHAPES
        return None

    def _say_what_keeps_changing(self, key: Key, num_captured: int) -> None:
        """Calls whose keys do not come back are never captured; that must not go unsaid."""
        num_warm = len(self._warm) + 1
        if any(isinstance(value, float | tuple) for value in key[0]):
            if num_warm >= _CHANGING_NUMBERS and not num_captured:
                self._say(
                    SkipKind.CHANGING_NUMBER,
                    "takes a number that differs from call to call, and a graph would keep the first one",
                    "Pass it as a tensor on the GPU to have this part captured",
                )
        elif key[0] and num_warm - num_captured > self._limits.max_graphs:
            self.say_too_many("a shape is captured when it comes the second time")

    def say_room_is_made(self) -> None:
        """Tell that a graph goes for another."""
        self.say_too_many("the least recently used graph makes room for a new one")

    def say_too_many(self, consequence: str) -> None:
        """Tell that there are more shapes than are captured."""
        self._say(
            SkipKind.TOO_MANY_SHAPES,
            f"was called with more than {self._limits.max_graphs} shapes; {consequence}",
            "Pad inputs to fewer sizes, name them in capture_sizes, or raise max_graphs",
        )

    def _say(self, kind: SkipKind, detail: str, advice: str) -> None:
        self._on_skip(self._note(kind, detail, advice))

    def _note(self, kind: SkipKind, detail: str, advice: str = "") -> SkipReason:
        callee = self._callee
        notice = SkipReason(kind=kind, detail=f"{callee.name} {detail}", where=callee.where, advice=advice)
        if kind not in {told.kind for told in self.notices}:
            self.notices.append(notice)
        return notice
