"""What the captures of one process share: who captures now, the garbage collector, side streams."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from graphcap_backend.capture.first_calls import FirstCallGuard
from graphcap_backend.errors import NestedCaptureError

if TYPE_CHECKING:
    import torch

    from graphcap_backend.capture.record import CapturedGraph
    from graphcap_backend.capture.session import CaptureSession


_FROZEN_AT_START = 10_000
"""Python 3.12 and later freeze some thousand objects themselves when they start; with torch loaded, a user
who freezes has ten times as many."""


class GarbagePause:
    """Keeps the cyclic garbage collector off while any capture is under way.

    Two captures may overlap in any order, so the first to begin notes what the user had and the last
    to end puts it back. What existed before a capture is frozen meanwhile: a collection that the
    user's own code forces inside it cannot destroy an older graph, which would invalidate the capture.
    """

    def __init__(self) -> None:
        self._holders = 0
        self._was_enabled = False
        self._we_froze = False

    def hold(self) -> None:
        """Turn collection off, or keep it off."""
        if self._holders == 0:
            self._was_enabled = gc.isenabled()
            # unfreeze() knows only all or nothing: never thaw what the user froze.
            self._we_froze = gc.get_freeze_count() <= _FROZEN_AT_START
        gc.disable()
        if self._we_froze:
            gc.freeze()
        self._holders += 1

    def release(self) -> None:
        """Take one hold back; the last one restores what the user had."""
        self._holders -= 1
        if self._holders:
            return
        if self._we_froze:
            gc.unfreeze()
        if self._was_enabled:
            gc.enable()
        else:
            gc.disable()


class SideStreams:
    """Our own capture streams: one per device, more only while captures overlap.

    Of those that are idle the first one made is handed out: memory of a pool serves the stream that it was
    allocated on, so captures that share a pool should be made on one.
    """

    def __init__(self) -> None:
        self._made: dict[int, list[torch.cuda.Stream]] = {}
        self._taken: list[torch.cuda.Stream] = []

    def take(self, device_index: int) -> torch.cuda.Stream:
        """A stream of that device that no capture of ours uses."""
        import torch

        made = self._made.setdefault(device_index, [])
        stream = next((one for one in made if one not in self._taken), None)
        if stream is None:
            stream = torch.cuda.Stream(device_index)  # type: ignore[no-untyped-call]
            made.append(stream)
        self._taken.append(stream)
        return stream

    def give_back(self, stream: torch.cuda.Stream) -> None:
        """Return a stream that :meth:`take` gave."""
        self._taken.remove(stream)


class CaptureProcess:
    """The one object that captures of a process share.

    Attributes:
        lock: held while a session enters or leaves; never while the user's code runs.
        first_calls: held by CUDA captures.
        captured: the record of each graph captured, as long as the graph object lives.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.captured: weakref.WeakKeyDictionary[Any, CapturedGraph] = weakref.WeakKeyDictionary()
        self.garbage = GarbagePause()
        self.side_streams = SideStreams()
        self.first_calls = FirstCallGuard(self._refuse_first_call)
        self._sessions: dict[int, CaptureSession] = {}  # by thread
        self._kept: dict[CaptureSession, list[Any]] = {}
        self._outliving: dict[object, tuple[Callable[[], bool], object]] = {}

    @property
    def num_active(self) -> int:
        """How many sessions are capturing, on all threads."""
        return len(self._sessions)

    @property
    def capturing_here(self) -> CaptureSession | None:
        """The session that captures on this thread."""
        return self._sessions.get(threading.get_ident())

    def _refuse_first_call(self, what: str) -> None:
        session = self.capturing_here
        if session is not None:
            session.refuse_first_call(what)

    def check_not_nested(self) -> None:
        """Raise NestedCaptureError inside another session of this thread."""
        if self.capturing_here is not None:
            raise NestedCaptureError(
                "a capture is already under way on this thread, and one capture cannot hold another. "
                "End the outer `graph` block first; the outer capture goes on unharmed"
            )

    def enter(self, session: CaptureSession) -> None:
        """Note that ``session`` captures on this thread."""
        self.check_not_nested()
        self._let_go()
        self._sessions[threading.get_ident()] = session
        # A graph destroyed inside a capture invalidates it, on the driver's side: ours live on until it ends.
        self._kept[session] = list(self.captured)

    def keep_while(self, needed: Callable[[], bool], kept: object) -> None:
        """Keep an object alive for as long as ``needed`` says so; asked at each capture and garbage collection.

        Takes no lock: finalizers call it.
        """
        self._outliving[object()] = needed, kept
        if self._after_collection not in gc.callbacks:
            gc.callbacks.append(self._after_collection)  # for good: taken out while they run, it would hide the next

    def _after_collection(self, phase: str, info: dict[str, int]) -> None:
        if phase == "stop" and self._outliving:
            self._let_go()

    def _let_go(self) -> None:
        # Other threads, and collections in between, may do the same; an interrupt must lose nothing.
        for entry, (needed, _) in tuple(self._outliving.items()):
            if not needed():
                self._outliving.pop(entry, None)

    def leave(self, session: CaptureSession) -> None:
        """Take :meth:`enter` back, on whichever thread the block ends."""
        self._kept.pop(session, None)
        self._sessions = {thread: other for thread, other in self._sessions.items() if other is not session}


PROCESS = CaptureProcess()
