"""Handing out the outputs of a graph: aliases of its memory, copies, or the caller's own inputs."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from sys import getrefcount
from typing import Any

import torch
from torch import Tensor

from graphcap_backend.capture.allocator import Range
from graphcap_backend.errors import CaptureError


@dataclass(frozen=True, slots=True)
class Buffer:
    """Output number ``slot`` among the graph's own output tensors."""

    slot: int


@dataclass(frozen=True, slots=True)
class InputAlias:
    """The caller's input itself (``view`` None), or a view of it: (size, stride, offset behind the input's)."""

    index: int
    view: tuple[tuple[int, ...], tuple[int, ...], int] | None


@dataclass(frozen=True, slots=True)
class Constant:
    """A value that is no tensor; the same at every replay of this key."""

    value: Any


@dataclass(frozen=True, slots=True)
class Same:
    """The very object returned at an earlier position."""

    position: int


Output = Buffer | InputAlias | Constant | Same

Probe = tuple[int, int, torch.UntypedStorage, int]
"""A storage in C++, its reference count when idle, its Python object, and the address of its memory."""

_use_count: Callable[[int], int] = torch._C._storage_Use_Count
_data_ptr: Callable[[torch.UntypedStorage], int] = torch.UntypedStorage.data_ptr


def any_in_use(probes: Sequence[Probe]) -> bool:
    """Whether somebody holds one of the storages, or resized it, which took it away. Runs at every replay."""
    for storage, baseline, wrapper, address in probes:
        if _use_count(storage) > baseline or getrefcount(wrapper) > _OWN_REFERENCES or _data_ptr(wrapper) != address:
            return True
    return False


def _own_references() -> int:
    """What ``getrefcount`` finds in such a loop when only a probe, and torch itself, refer to the object."""
    count, tensor = 0, torch.empty(1)
    probes = ((0, 0, tensor.untyped_storage(), 0),)
    for _, _, wrapper, _ in probes:
        count = getrefcount(wrapper)
    return count


_OWN_REFERENCES = _own_references()


class OwnedOutput:
    """One storage that a graph hands outputs out of.

    ``in_use`` compares the storage's reference count with what it was when nobody but the graph held
    it, so views, tensors saved by autograd, ``.grad`` and holders in C++ all count. The Python object of a
    storage is one holder for C++ however many hold it in Python, so references to that are counted too.

    Args:
        tensors: the graph's own tensors over the storage. Held here, so that the idle count is the same for
            those who watch this output when the graph is gone.
        owner: who hands it out; known weakly.
        kept: what keeps the memory allocated, where the storage does not.
    """

    __slots__ = ("_kept", "_owner", "_probe", "_tensors", "address", "num_bytes", "storage", "stream")

    def __init__(self, tensors: Sequence[Tensor], owner: object, kept: Sequence[Tensor] | None = None) -> None:
        storage = tensors[0].untyped_storage()
        self._tensors = tuple(tensors)
        self._kept = kept
        self._owner: weakref.ref[object] | None = weakref.ref(owner)
        self.stream: int | None = None
        """Raw handle of the stream that it was last handed out on, once a device's graphs ran on several."""
        self.storage = storage._cdata
        self.address = storage.data_ptr()
        self.num_bytes = storage.nbytes()
        self._probe: Probe = (self.storage, 0, storage, self.address)

    @property
    def range(self) -> Range:
        """The memory that callers see."""
        return self.address, self.address + self.num_bytes

    @property
    def is_lent(self) -> bool:
        """Whether the memory is a pool's, which may have it back, and not that of the storage itself."""
        return self._kept is not None

    @property
    def is_allocated(self) -> bool:
        """Whether the allocator knows that the memory is taken."""
        return self._kept is None or bool(self._kept)

    def give_back(self) -> None:
        """Let the pool have the memory again, for other graphs to write to. Call only when nobody holds it."""
        assert self._kept is not None, "memory that the storage itself owns"
        self._kept = ()

    @property
    def released(self) -> bool:
        """Whether the graph is gone; callers may still hold the output."""
        return self._owner is None or self._owner() is None

    def release(self) -> None:
        """The graph is gone."""
        self._owner = None

    def set_baseline(self) -> None:
        """Call once, when only the graph holds the storage."""
        storage, _, wrapper, address = self._probe
        self._probe = (storage, self.use_count(), wrapper, address)

    def raise_baseline(self, by: int) -> None:
        """A graph holds the storage ``by`` times more (or, negative, less) than before."""
        storage, baseline, wrapper, address = self._probe
        self._probe = (storage, baseline + by, wrapper, address)

    def use_count(self) -> int:
        """Holders of the storage now."""
        return _use_count(self.storage)

    @property
    def is_resized(self) -> bool:
        """Whether somebody resized the storage. Its memory is not the graph's any more."""
        return self._probe[2].data_ptr() != self.address

    def in_use(self) -> bool:
        """Whether a caller holds memory of the graph."""
        return not self.is_resized and any_in_use((self._probe,))

    def probe(self) -> Probe:
        """What ``any_in_use`` takes: always the same tuple, since it alone may refer to the storage's object."""
        return self._probe


def unowned_aliases(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Tensors over the memory of ``tensors`` that do not keep it allocated; they alias each other as those do."""
    construct: Any = torch._C._construct_storage_from_data_pointer
    unowned: dict[int, Any] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage._cdata not in unowned:
            unowned[storage._cdata] = construct(storage.data_ptr(), tensor.device, storage.nbytes())
    return [_over(unowned[tensor.untyped_storage()._cdata], tensor) for tensor in tensors]


def plan_outputs(
    outputs: Sequence[Any], input_storages: dict[int, int], inputs_like: Sequence[Any]
) -> tuple[list[Output], list[Tensor]]:
    """Sort the outputs of a captured run.

    Args:
        outputs: what the captured callable returned.
        input_storages: which storage belongs to which input, of those that an output may alias.
        inputs_like: tensors with the layout of those inputs.

    Returns:
        how to make each output, and the graph's own output tensors that ``Buffer`` refers to.
    """
    plan: list[Output] = []
    own: list[Tensor] = []
    seen: dict[int, int] = {}
    for position, output in enumerate(outputs):
        if not isinstance(output, Tensor):
            plan.append(Constant(output))
        elif id(output) in seen:
            plan.append(Same(seen[id(output)]))
        elif (index := input_storages.get(output.untyped_storage()._cdata)) is not None:
            plan.append(_input_alias(output, index, inputs_like[index]))
        else:
            plan.append(Buffer(len(own)))
            own.append(output)
        seen.setdefault(id(output), position)
    return plan, own


def _input_alias(output: Tensor, index: int, staged: Tensor) -> InputAlias:
    if output.is_conj() != staged.is_conj() or output.is_neg() != staged.is_neg():
        raise CaptureError(f"output is input {index}, conjugated or negated; only plain views are handed out")
    if output is staged or (
        output.dtype == staged.dtype
        and output.size() == staged.size()
        and output.stride() == staged.stride()
        and output.storage_offset() == staged.storage_offset()
    ):
        return InputAlias(index, None)
    if output.dtype != staged.dtype:
        raise CaptureError(
            f"an output is input {index} seen as {output.dtype}; only views of an input's own dtype can be handed out"
        )
    offset = int(output.storage_offset() - staged.storage_offset())
    return InputAlias(index, (tuple(output.size()), tuple(output.stride()), offset))


class HandOut:
    """Makes one call's outputs of the tensors to give away (aliases or copies) and the call's inputs."""

    def __init__(self, plan: Sequence[Output], num_own: int, num_inputs: int) -> None:
        self._constants = [output.value for output in plan if isinstance(output, Constant)]
        self._views: list[tuple[int, int, tuple[tuple[int, ...], tuple[int, ...], int]]] = []
        self._same: list[tuple[int, int]] = []
        positions: list[int] = []
        num_constants = 0
        for position, output in enumerate(plan):
            if isinstance(output, Buffer):
                positions.append(output.slot)
            elif isinstance(output, Same):
                positions.append(positions[output.position])
                self._same.append((position, output.position))
            elif isinstance(output, Constant):
                positions.append(num_own + num_inputs + num_constants)
                num_constants += 1
            else:
                positions.append(num_own + output.index)
                if output.view is not None:
                    self._views.append((position, output.index, output.view))
        self.passes_on = positions == list(range(num_own))
        """Whether the tensors to give away are the outputs as they are, so that there is nothing to make."""
        self._pick = picker(positions)

    def __call__(self, own: list[Tensor], inputs: Sequence[Any]) -> list[Any]:
        given = self._pick([*own, *inputs, *self._constants])
        for position, index, (size, stride, offset) in self._views:
            base = inputs[index]
            given[position] = base.as_strided(size, stride, base.storage_offset() + offset)
        if self._views:
            for position, earlier in self._same:
                given[position] = given[earlier]
        return given


def picker(positions: Sequence[int]) -> Callable[[Sequence[Any]], list[Any]]:
    """A function that gives the values at these positions."""
    if len(positions) < 2:
        return lambda values: [values[i] for i in positions]
    pick = itemgetter(*positions)
    return lambda values: list(pick(values))


def copy_outputs(own: Sequence[Tensor]) -> list[Tensor]:
    """Copies that alias each other where the originals do, with the same strides."""
    storages: dict[int, Tensor] = {}
    copies = []
    for tensor in own:
        storage = tensor.untyped_storage()
        if storage.nbytes() == tensor.numel() * tensor.element_size() and _dense(tensor):
            whole = storages.get(storage._cdata)
            if whole is None and sum(other.untyped_storage()._cdata == storage._cdata for other in own) == 1:
                copies.append(tensor.clone())
                continue
        if storage._cdata not in storages:
            raw = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
            storages[storage._cdata] = raw.clone()
        copies.append(_over(storages[storage._cdata].untyped_storage(), tensor))
    return copies


def _over(storage: torch.UntypedStorage, like: Tensor) -> Tensor:
    """A tensor over ``storage`` as ``like`` is over its own."""
    tensor = torch.empty(0, dtype=like.dtype, device=like.device)
    tensor.set_(storage, like.storage_offset(), like.size(), like.stride())
    tensor = tensor.conj() if like.is_conj() else tensor
    return torch._neg_view(tensor) if like.is_neg() else tensor


def _dense(tensor: Tensor) -> bool:
    return bool(torch.ops.aten.is_non_overlapping_and_dense(tensor))
