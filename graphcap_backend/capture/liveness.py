"""Inputs that a captured graph reads, and whether their memory is still theirs at a replay.

An input is memory: a storage, at the address it had. Views share it, and a new tensor at the same address
does not revive it. What the capture allocated itself is no input, nor is memory of the graph's own pool.
"""

from __future__ import annotations

import sys
import textwrap
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from graphcap_backend.errors import InputLivenessError

_MOST_NAMED = 5
_MADE_UNKNOWN = "unknown; torch.cuda.memory._record_memory_history() before it is made lets us tell"


class _StorageRef:
    """A weak reference to a storage. While it exists no other storage gets the same identity."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.weak: int = storage._weak_ref()  # type: ignore[assignment]  # an address, whatever its stub says
        weakref.finalize(self, torch.UntypedStorage._free_weak_ref, self.weak).atexit = False


class InputMemory:
    """One storage from outside that a capture saw."""

    def __init__(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        self.cdata: int = storage._cdata
        self.address = storage.data_ptr()
        self.num_own_holders = 0
        """How often the graph itself holds the storage: a HostGraph keeps what it reads."""
        self.made_at: str | None = None
        self.used_at: str | None = None
        """Where the capture first used it; None while only views of it were made."""
        self.freed_at: str | None = None
        self._text = f"a {str(tensor.dtype).removeprefix('torch.')} tensor of shape {tuple(tensor.shape)} "
        self._text += f"on {tensor.device}"
        self._is_cuda = tensor.is_cuda
        self._ref = _StorageRef(storage)
        self._holders: dict[int, weakref.ref[Any]] = {}
        self.note_holder(storage)

    def note_holder(self, holder: Any) -> None:
        """``holder`` keeps the memory; where the last one dies is where the memory is freed."""
        key = id(holder)
        if key in self._holders:
            return
        me = weakref.ref(self)

        def on_freed(_: object) -> None:
            watched = me()
            if watched is not None:
                watched._holders.pop(key, None)
                watched.freed_at = _user_stack()

        self._holders[key] = weakref.ref(holder, on_freed)

    def alive(self) -> bool:
        """Whether somebody besides the graph still holds the memory that was captured."""
        if torch.UntypedStorage._expired(self._ref.weak):
            return False
        if self.num_own_holders:
            count: int = torch._C._storage_Use_Count(self.cdata)
            return count > self.num_own_holders + _python_share()
        storage = torch.UntypedStorage._new_with_weak_ptr(self._ref.weak)
        return storage is not None and storage.data_ptr() == self.address

    def describe(self) -> str:
        """A few lines about an input that is gone."""
        stacks = {
            "made": self.made_at or (_MADE_UNKNOWN if self._is_cuda else "unknown"),
            "first used in the capture": self.used_at or "unknown",
            "freed": self.freed_at or "unknown",
        }
        return "\n".join([self._text, *(f"  {what}:\n{textwrap.indent(at, '    ')}" for what, at in stacks.items())])


class InputWatch:
    """The inputs of one capture: noted while it runs, checked at each replay.

    Args:
        counts: whether a tensor's memory can be an input on the captured device.
        num_launches: how many nodes were captured so far.
        named: tensors that are inputs whatever the operators show.
    """

    def __init__(
        self, counts: Callable[[Tensor], bool], num_launches: Callable[[], int], named: Sequence[Tensor] = ()
    ) -> None:
        self._counts = counts
        self._num_launches = num_launches
        self._seen: dict[int, InputMemory] = {}
        self._born: dict[int, _StorageRef] = {}
        self._open = ExitStack()
        self.thread = threading.get_ident()
        for tensor in named:
            if counts(tensor):
                self.use(tensor)

    @property
    def inputs(self) -> list[InputMemory]:
        """Memory from outside that launches use."""
        return [memory for memory in self._seen.values() if memory.used_at is not None]

    def start(self) -> None:
        """See the operators and compiled regions of this thread from now on."""
        from graphcap_backend.inductor import compiled_calls_shown

        self._open.enter_context(_WatchMode(self))
        self._open.enter_context(compiled_calls_shown(self))

    def stop(self) -> None:
        """See no more. May be called again."""
        self._open.close()
        self._born.clear()

    def call_compiled(self, call: Callable[[Any], Any], inputs: Any) -> Any:
        """Run one compiled region of the block and note what it uses."""
        return self.run(inputs, lambda: call(inputs))

    def run(self, arguments: Any, launch: Callable[[], Any]) -> Any:
        """Run one operator of the block and note what it uses."""
        tensors = (value for value in tree_iter(arguments) if self._has_memory(value))
        # No reference to a tensor is kept here: compiled regions free their inputs while they run.
        seen = [memory for memory in map(self._see, tensors) if memory is not None]
        before = self._num_launches()
        result = launch()
        if self._num_launches() != before:
            for memory in seen:
                memory.used_at = memory.used_at or _user_stack()
        for value in tree_iter(result):
            if self._has_memory(value):
                storage = value.untyped_storage()
                if storage._cdata not in self._seen and storage._cdata not in self._born:
                    self._born[storage._cdata] = _StorageRef(storage)
        return result

    def use(self, tensor: Tensor, *, num_own_holders: int = 0) -> None:
        """A launch reads or writes ``tensor``, which the graph itself holds so many times."""
        memory = self._see(tensor)
        if memory is not None:
            memory.num_own_holders = num_own_holders
            memory.used_at = memory.used_at or _user_stack()

    def _see(self, tensor: Tensor) -> InputMemory | None:
        key = tensor.untyped_storage()._cdata
        if key in self._born:
            return None
        memory = self._seen.get(key)
        if memory is None:
            memory = self._seen[key] = InputMemory(tensor)
        memory.note_holder(tensor)
        return memory

    def _has_memory(self, value: object) -> bool:
        return isinstance(value, Tensor) and not _is_wrapper(value) and self._counts(value) and value.data_ptr() != 0

    def keep_only(self, storages: Iterable[int]) -> None:
        """Only these storages (``_cdata``) are from outside."""
        outside = set(storages)
        self._seen = {key: memory for key, memory in self._seen.items() if key in outside}

    def sort_out(self, segments: Sequence[Mapping[str, Any]], pool: tuple[int, ...]) -> None:
        """Use a memory snapshot: drop what lies in ``pool``, note where the rest was made if that was recorded."""
        for key, memory in list(self._seen.items()):
            segment = next((s for s in segments if _holds(s["address"], s["total_size"], memory.address)), None)
            if segment is None:
                continue
            if tuple(segment["segment_pool_id"]) == pool:
                del self._seen[key]
                continue
            for block in segment["blocks"]:
                if _holds(block["address"], block["size"], memory.address) and block.get("frames"):
                    memory.made_at = "\n".join(f"{f['filename']}:{f['line']}:{f['name']}" for f in block["frames"])

    def check(self) -> None:
        """Raise InputLivenessError if an input is gone."""
        dead = [memory for memory in self.inputs if not memory.alive()]
        if dead:
            named = "\n".join(memory.describe() for memory in dead[:_MOST_NAMED])
            more = f"\n... and {len(dead) - _MOST_NAMED} more" if len(dead) > _MOST_NAMED else ""
            raise InputLivenessError(
                f"replay() would use memory of {len(dead)} tensor(s) that were freed since the capture. Keep what "
                f"the capture reads from outside alive for as long as the graph is replayed:\n{named}{more}"
            )


class CheckedReplay:
    """``graph.replay`` with the check before it: put on the graph object itself as an attribute.

    It lies over the method of the class for as long as the graph holds the watched capture, so that code that
    replays the graph, ours or not, is checked, and graphs that are not watched cost nothing.
    """

    def __init__(self, graph: Any, watch: InputWatch, still_captured: Callable[[], bool]) -> None:
        self._graph = weakref.ref(graph)
        self._watch = watch
        self._still_captured = still_captured
        graph.replay = self

    def __call__(self) -> None:
        graph: Any = self._graph()
        if self._still_captured():
            self._watch.check()
        else:
            self.remove(graph)
        type(graph).replay(graph)

    @staticmethod
    def remove(graph: Any) -> None:
        """Take the check off ``graph``, if it has one."""
        if isinstance(vars(graph).get("replay"), CheckedReplay):
            del graph.replay


class _WatchMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Shows the operators of one thread to a watch."""

    supports_higher_order_operators = True

    def __init__(self, watch: InputWatch) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._watch = weakref.ref(watch)

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled functions stay compiled; what they read is named by whoever knows."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        watch = self._watch()
        if watch is None:
            return func(*args, **(kwargs or {}))
        return watch.run((args, kwargs or {}), lambda: func(*args, **(kwargs or {})))


@cache
def _python_share() -> int:
    """How many of a storage's holders are its Python object, once there is one: 1 or, in other torches, 0."""
    tensor = torch.empty(1)
    storage = tensor.untyped_storage()
    cdata = storage._cdata
    del storage
    count: int = torch._C._storage_Use_Count(cdata)
    return count - 1


def _is_wrapper(tensor: Tensor) -> bool:
    """Whether the memory is that of tensors inside it; operators on those are seen too."""
    return torch.utils._python_dispatch.is_traceable_wrapper_subclass(tensor) or tensor.layout != torch.strided


def _holds(start: int, size: int, address: int) -> bool:
    return bool(start <= address < start + size)


def _user_stack() -> str:
    """ "file:line:function" lines, innermost first, without torch's frames and ours."""
    skipped = (torch.__path__[0], __file__.rpartition("/capture/")[0])
    lines: list[str] = []
    frame = sys._getframe(1)
    current: Any = frame
    while current is not None:
        code = current.f_code
        if not code.co_filename.startswith(skipped):
            lines.append(f"{code.co_filename}:{current.f_lineno}:{code.co_name}")
        current = current.f_back
    return "\n".join(lines)
