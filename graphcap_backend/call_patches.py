"""Functions replaced for as long as somebody wants the calls that one thread makes of them."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Generic, Protocol, TypeVar


class CallSink(Protocol):
    """Who gets calls, of those made on ``thread``."""

    thread: int


class HostKernelSink(CallSink, Protocol):
    """Who gets the kernel calls of generated modules, for calls on ``thread``."""

    def launch_kernel(
        self, name: str, kernel: Callable[..., Any], args: tuple[Any, ...], writes: Sequence[bool]
    ) -> None:
        """Take the place of ``kernel(*args)``; ``writes`` says which arguments it may write."""

    def allocate(self, allocate: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Take the place of ``allocate(*args)``, which makes an uninitialised buffer."""


class CompiledCallSink(CallSink, Protocol):
    """Who is shown the calls of compiled regions on ``thread``."""

    def call_compiled(self, call: Callable[[Any], Any], inputs: Any) -> Any:
        """Return ``call(inputs)``; ``inputs`` is the list of all the region reads, which the call may clear."""


Sink = TypeVar("Sink", bound=CallSink)


class Patch(Generic[Sink]):
    """Stands where an owner (a module, a class) had a function, for as long as a capture needs it.

    It carries the captures that wait for calls, by thread, so that captures of several threads
    may come and go in any order; calls of other threads go straight through.
    """

    lock: ClassVar[threading.RLock] = threading.RLock()

    def __init__(self, original: Callable[..., Any]) -> None:
        self.original = original
        self.sinks: dict[int, Sink] = {}

    @staticmethod
    def add(owner: Any, name: str, sink: Sink, make: Callable[..., Patch[Sink]]) -> None:
        """Let calls of ``owner.name`` on the sink's thread go to it; ``make`` makes the patch where none is yet."""
        with Patch.lock:
            patch = owner.__dict__[name]
            if not isinstance(patch, Patch):
                patch = make(patch)
                setattr(owner, name, patch)
            patch.sinks[sink.thread] = sink

    @staticmethod
    def remove(owner: Any, name: str, sink: CallSink) -> None:
        """Undo ``add``; the original is put back when its last sink goes."""
        with Patch.lock:
            patch = owner.__dict__.get(name)
            if isinstance(patch, Patch):
                patch.sinks.pop(sink.thread, None)
                if not patch.sinks:
                    setattr(owner, name, patch.original)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.original(*args, **kwargs)


class KernelPatch(Patch[HostKernelSink]):
    """In place of a kernel; ``types`` are the C++ types of its arguments, if they are known."""

    def __init__(self, original: Callable[..., Any], name: str, types: Sequence[str]) -> None:
        super().__init__(original)
        self.name, self.types = name, types

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        sink = self.sinks.get(threading.get_ident())
        if sink is None or kwargs:
            return self.original(*args, **kwargs)
        known = self.types if len(self.types) == len(args) else ("",) * len(args)
        writes = [not argument_type.startswith("const ") for argument_type in known]
        return sink.launch_kernel(self.name, self.original, args, writes)


class AllocationPatch(Patch[HostKernelSink]):
    """In place of a function that makes an uninitialised buffer."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        sink = self.sinks.get(threading.get_ident())
        if sink is None or kwargs:
            return self.original(*args, **kwargs)
        return sink.allocate(self.original, args)


class RegionPatch(Patch[CompiledCallSink]):
    """In place of the ``__call__`` of a class of compiled regions."""

    def __get__(self, instance: Any, owner: type) -> Callable[[Any], Any]:
        call: Callable[[Any], Any] = self.original.__get__(instance, owner)
        sink = self.sinks.get(threading.get_ident())
        return call if sink is None else functools.partial(sink.call_compiled, call)
