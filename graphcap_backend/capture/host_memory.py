"""Which memory a host capture made, and stand-ins for memory it must not touch.

A capture shows nothing outside. Work on tensors born in the capture just runs. The first
launch that writes to memory from outside gets a copy of that storage to work on, its
stand-in, and all later launches of the capture see the stand-in, so that values, and
with them errors, are those of an eager run. Stand-ins live until the capture ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, UntypedStorage


@contextmanager
def plain_kernels() -> Iterator[None]:
    """Call operators as bare kernels: no autograd, autocast, modes or version counters.

    Inference mode is off inside, so that what is allocated can be used in every mode, and
    tensors from inference mode may be written to.
    """
    autocast = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
    with ExitStack() as stack:
        stack.enter_context(torch._C._InferenceMode(False))
        stack.enter_context(torch.no_grad())
        stack.enter_context(torch._C._DisableTorchDispatch())
        stack.enter_context(torch._C.DisableTorchFunction())
        stack.enter_context(torch._C._AutoDispatchBelowADInplaceOrView())
        stack.enter_context(torch._C._ExcludeDispatchKeyGuard(autocast))
        yield


def map_tensors(value: Any, function: Callable[[Tensor], Any]) -> Any:
    """Apply ``function`` to the tensors in an operator's argument or result."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, (list, tuple)):
        items = [map_tensors(item, function) for item in value]
        if isinstance(value, list):
            return items
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    if isinstance(value, dict):
        return {key: map_tensors(item, function) for key, item in value.items()}
    return value


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors in an operator's argument or result, in order."""
    found: list[Tensor] = []
    map_tensors(value, found.append)
    return found


def retained(tensor: Tensor) -> Tensor:
    """Another tensor object on the same memory, without gradient, history or version."""
    return tensor.data


def on_storage(tensor: Tensor, storage: UntypedStorage) -> Tensor:
    """``tensor``'s layout on another storage."""
    other = torch.empty(0, dtype=tensor.dtype).set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())
    if tensor.is_conj():
        torch._C._set_conj(other, True)
    if tensor.is_neg():
        torch._C._set_neg(other, True)
    return other


class Borrowed:
    """The arguments of one launch as the capture may use them."""

    def __init__(self) -> None:
        self._originals: dict[int, tuple[Tensor, Tensor]] = {}

    def lend(self, original: Tensor, used: Tensor) -> Tensor:
        self._originals[id(used)] = (original, used)
        return used

    def original(self, used: Tensor) -> Tensor | None:
        """The caller's own tensor, when ``used`` was an argument."""
        pair = self._originals.get(id(used))
        return pair[0] if pair is not None else None

    def pairs(self) -> Sequence[tuple[Tensor, Tensor]]:
        return list(self._originals.values())


class HostMemory:
    """Memory born in one capture, and stand-ins. Call it under ``plain_kernels``."""

    def __init__(self) -> None:
        # Keyed by StorageImpl; the storages are held so that no address is used twice.
        self._born: dict[int, UntypedStorage] = {}
        self._stand_ins: dict[int, tuple[UntypedStorage, UntypedStorage]] = {}
        self._real: dict[int, UntypedStorage] = {}

    def add_born(self, tensor: Tensor) -> None:
        """``tensor`` was allocated in the capture."""
        storage = tensor.untyped_storage()
        self._born[storage._cdata] = storage

    def is_born(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._born

    def protect(self, tensor: Tensor) -> None:
        """The coming launch writes to ``tensor``: give outside memory a stand-in."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._born and key not in self._stand_ins:
            stand_in: UntypedStorage = storage.clone()  # type: ignore[no-untyped-call]
            self._stand_ins[key] = (storage, stand_in)
            self._real[stand_in._cdata] = storage

    def borrow(self, value: Any, borrowed: Borrowed) -> Any:
        """``value`` with the tensors that have a stand-in replaced."""

        def usable(tensor: Tensor) -> Tensor:
            pair = self._stand_ins.get(tensor.untyped_storage()._cdata)
            used = tensor if pair is None else on_storage(tensor, pair[1])
            return borrowed.lend(tensor, used)

        return map_tensors(value, usable)

    def give_back(self, value: Any, borrowed: Borrowed) -> tuple[Any, list[Tensor | None]]:
        """A launch's result for the caller, and its new tensors by flat position.

        Arguments come back as the caller's own objects, views of stand-ins as views of the
        real memory; what is left is new memory, born here. The list has None for the rest.
        """
        argument_memory = {used.untyped_storage()._cdata for _, used in borrowed.pairs()}
        new: list[Tensor | None] = []

        def mine(tensor: Tensor) -> Tensor:
            original = borrowed.original(tensor)
            if original is not None:
                new.append(None)
                return original
            key = tensor.untyped_storage()._cdata
            if key in self._real:
                new.append(None)
                return on_storage(tensor, self._real[key])
            if key in argument_memory or tensor.device.type != "cpu":
                new.append(None)
                return tensor
            self.add_born(tensor)
            new.append(tensor)
            return tensor

        return map_tensors(value, mine), new
