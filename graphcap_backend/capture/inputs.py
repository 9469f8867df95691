"""Inputs of a captured callable: which stay where they are, which are copied in, and how."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from graphcap_backend.capture.allocator import Range
from graphcap_backend.capture.device import ALIGNMENT
from graphcap_backend.capture.outputs import unowned_aliases
from graphcap_backend.capture.skip import SkipKind, SkipReason


@dataclass(frozen=True, kw_only=True, slots=True)
class InputRoles:
    """Positions of the inputs by what a replay does with them. Fixed for one callable and one set of input kinds."""

    static: tuple[int, ...]
    """Tensors whose address is captured and checked: parameters, buffers, saved activations."""
    copied: tuple[int, ...]
    """Tensors that are copied into the graph's own buffers before a replay."""
    written_back: tuple[int, ...]
    """The copied ones that the callable writes to: copied back into the caller's tensor after a replay."""
    written_static: tuple[int, ...]
    """The static ones that the callable writes to: buffers of modules."""
    values: tuple[int, ...]
    """Everything that is no tensor: part of the key."""
    written_sizes: tuple[torch.Size, ...]
    """Of the inputs written back, where code is made for one size each; empty where sizes are values."""
    host_scalars: tuple[int, ...]
    """Tensors of one element on the CPU, read by work on a GPU: launches take the value, so it is part of the key."""

    def variable_key(self, inputs: Sequence[Any]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """What of a call's key may differ although the static addresses are the same: values, and layouts.

        Shapes differ from call to call only together with a symbolic size, which is one of the values.
        """
        values = tuple(inputs[i] for i in self.values)
        shapes = tuple((inputs[i].size(), inputs[i].stride()) for i in self.copied) if values else ()
        return values + tuple(_host_value(inputs[i]) for i in self.host_scalars), shapes

    def only_read(self, inputs: Sequence[Any]) -> tuple[int, ...]:
        """Of the copied inputs, those that compiled kernels may as well read where they are."""
        read = (i for i in self.copied if i not in self.written_back and inputs[i].numel())
        return tuple(i for i in read if inputs[i].data_ptr() % ALIGNMENT == 0)

    def check_written_sizes(self, inputs: Sequence[Any]) -> None:
        """Refuse a call that the code was not made for.

        Inputs that overlap are one input for AOTAutograd, and Dynamo does not guard on what they have in common.
        Inductor's own check is not there in code that is to be captured.

        Raises:
            AssertionError: as that check does.
        """
        for i, expected in zip(self.written_back, self.written_sizes, strict=False):
            if inputs[i].size() != expected:
                raise AssertionError(
                    f"input {i}, which is written to, has size {tuple(inputs[i].size())}; the code was compiled for "
                    f"{tuple(expected)}. Do the call's inputs overlap in other ways than at the first call? Pass copies"
                )

    def reading_in_place(self, indices: Sequence[int]) -> InputRoles:
        """The same, but for some inputs that are read where they are instead of copied."""
        copied = tuple(i for i in self.copied if i not in indices)
        return replace(self, static=(*self.static, *indices), copied=copied)

    def sizes(self, inputs: Sequence[Any], among: Sequence[int] | None) -> tuple[int, ...]:
        """The inputs that are symbolic sizes: ints at the positions ``among``; None for all positions."""
        ints = [i for i in self.values if isinstance(inputs[i], int)]
        return tuple(inputs[i] for i in ints if among is None or i in among)


def _host_value(tensor: Tensor) -> tuple[str, Any]:
    # Asking a tensor that turns out to be on the GPU would wait for it; it is of another kind then.
    # As text, since 0.0 equals -0.0, but 1 / 0.0 does not equal 1 / -0.0; and NaN equals nothing, itself included.
    return str(tensor.dtype), repr(tensor.item()) if tensor.is_cpu else None


def input_kinds(inputs: Sequence[Any]) -> tuple[torch.device | None, ...]:
    """Which inputs are tensors, and on which device."""
    return tuple(value.device if isinstance(value, Tensor) else None for value in inputs)


def assign_roles(
    inputs: Sequence[Any], static: Sequence[int], mutated: Sequence[int], device: torch.device
) -> InputRoles:
    """Sort the inputs of a first call of their kinds."""
    host_scalars = tuple(i for i, value in enumerate(inputs) if _is_host_scalar(value, device))
    tensors = [i for i, value in enumerate(inputs) if isinstance(value, Tensor) and i not in host_scalars]
    static = [i for i in static if i in tensors]
    statics = tuple(static)
    copied = tuple(i for i in tensors if i not in set(statics))
    written_back = tuple(i for i in copied if i in set(mutated))
    values = tuple(i for i, value in enumerate(inputs) if not isinstance(value, Tensor))
    return InputRoles(
        static=statics,
        copied=copied,
        written_back=written_back,
        written_static=tuple(i for i in statics if i in set(mutated)),
        values=values,
        written_sizes=() if values else tuple(inputs[i].size() for i in written_back),
        host_scalars=host_scalars,
    )


def _is_host_scalar(value: Any, device: torch.device) -> bool:
    return isinstance(value, Tensor) and value.is_cpu and device.type != "cpu" and value.dim() == 0


def refuse_inputs(inputs: Sequence[Any], device: torch.device) -> SkipReason | None:
    """Why a callable with such inputs can never be captured, or None."""
    for index, value in enumerate(inputs):
        if isinstance(value, torch.Generator):
            return SkipReason(kind=SkipKind.GENERATOR_INPUT, detail=f"input {index} is a torch.Generator")
        if isinstance(value, list | tuple) and any(isinstance(part, Tensor) for part in value):
            # Inductor passes the state of a loop from one partition to the next in such a way.
            return SkipReason(
                kind=SkipKind.SEQUENCE_INPUT, detail=f"input {index} is a {type(value).__name__} of tensors"
            )
        if not isinstance(value, Tensor) or value.device == device or _is_host_scalar(value, device):
            continue
        if value.device.type == "cpu":
            return SkipReason(
                kind=SkipKind.CPU_TENSOR_INPUT,
                detail=f"input {index} is a CPU tensor of shape {tuple(value.shape)} read by work on {device}",
                advice="Move it to the GPU to have this part captured",
            )
        return SkipReason(
            kind=SkipKind.OTHER_DEVICE_INPUT, detail=f"input {index} is on {value.device}, the graph on {device}"
        )
    return None


def refuse_layout(inputs: Sequence[Any], roles: InputRoles) -> SkipReason | None:
    """Why inputs of such shapes and strides cannot be copied in, or None."""
    for index in roles.copied:
        if torch._debug_has_internal_overlap(_without_expansion(inputs[index])) == 1:
            return SkipReason(kind=SkipKind.OVERLAP, detail=f"input {index} overlaps itself in memory")
    return None


def refuse_written_overlap(inputs: Sequence[Any], roles: InputRoles, static: Sequence[Range]) -> SkipReason | None:
    """Why this very call cannot be served by copying inputs in, or None.

    Args:
        static: what ``written_ranges`` gave for the static inputs that are written to.
    """
    if static and reads_any(inputs, roles.copied, static):
        return SkipReason(kind=SkipKind.OVERLAP, detail="an input shares memory with a buffer that is written to")
    if roles.written_back:
        storages = [inputs[i].untyped_storage()._cdata for i in (*roles.static, *roles.copied)]
        if any(storages.count(inputs[i].untyped_storage()._cdata) > 1 for i in roles.written_back):
            return SkipReason(
                kind=SkipKind.OVERLAP, detail="an input that is written to shares memory with another input"
            )
    return None


def written_ranges(inputs: Sequence[Any], roles: InputRoles) -> tuple[Range, ...]:
    """Memory of the static inputs that the callable writes to."""
    return tuple(_range_of(inputs[i]) for i in roles.written_static if inputs[i].numel())


def reads_any(inputs: Sequence[Any], copied: Sequence[int], ranges: Sequence[Range]) -> bool:
    """Whether an input that would be copied in has memory in common with one of the ranges."""
    for i in copied:
        if inputs[i].numel():
            begin, end = _range_of(inputs[i])
            if any(begin < last and first < end for first, last in ranges):
                return True
    return False


def _range_of(tensor: Tensor) -> Range:
    extent = sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True)) + 1
    address = tensor.data_ptr()
    return address, address + extent * tensor.element_size()


def _expanded_dims(tensor: Tensor) -> tuple[int, ...]:
    return tuple(d for d in range(tensor.dim()) if tensor.stride(d) == 0 and tensor.size(d) > 1)


def _without_expansion(tensor: Tensor) -> Tensor:
    for dim in _expanded_dims(tensor):
        tensor = tensor.narrow(dim, 0, 1)
    return tensor


def run_on_aligned_copies(
    run: Callable[[list[Any]], Sequence[Any]], inputs: list[Any], misaligned: Sequence[int], mutated: Sequence[int]
) -> Sequence[Any]:
    """Run a callable that assumes alignment; what it writes to a copy reaches the caller's tensor."""
    originals = [(inputs[i], i) for i in misaligned]
    for tensor, i in originals:
        inputs[i] = _aligned_copy(tensor)
    copies = [(tensor, inputs[i]) for tensor, i in originals if i in mutated]
    outputs = run(inputs)
    with torch.no_grad():
        for tensor, copy in copies:
            tensor.copy_(copy)
    return outputs


def _aligned_copy(tensor: Tensor) -> Tensor:
    """A copy with the same strides, overlaps included, which torch's allocators align."""
    if tensor.numel() == 0:
        return tensor.clone()
    extent = sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True)) + 1
    flat = tensor.detach().as_strided((extent,), (1,)).clone()
    return flat.as_strided(tensor.size(), tensor.stride())


class Staging:
    """The buffers of one graph that non-static inputs are copied into, laid out as the inputs are.

    After ``disown`` the buffers' memory belongs to the pool again and serves other graphs as well: what
    is in it need only last from ``load`` to the end of one replay.
    """

    __slots__ = ("_expanded", "_filled", "_targets", "_written_back", "buffers", "fills", "num_bytes", "writes_back")

    def __init__(self, inputs: Sequence[Any], roles: InputRoles) -> None:
        self.buffers: dict[int, Tensor] = {}
        for i in roles.copied:
            like = inputs[i]
            self.buffers[i] = torch.empty_strided(like.size(), like.stride(), dtype=like.dtype, device=like.device)
        self._filled = tuple(i for i in roles.copied if inputs[i].numel())
        # A tensor that repeats itself along a dimension is copied once, not once per repetition.
        self._expanded = any(_expanded_dims(inputs[i]) for i in self._filled)
        self._written_back = tuple(i for i in roles.written_back if inputs[i].numel())
        self.writes_back = bool(self._written_back)
        self.fills = bool(self._filled)
        self.num_bytes = sum(buffer.untyped_storage().nbytes() for buffer in self.buffers.values())
        self._set_targets()

    def _set_targets(self) -> None:
        self._targets = [_without_expansion(self.buffers[i]) for i in self._filled]

    def stand_in(self, inputs: Sequence[Any]) -> list[Any]:
        """The inputs to capture with: buffers in place of the inputs that will be copied."""
        return [self.buffers.get(i, value) for i, value in enumerate(inputs)]

    def leave_out(self, indices: Iterable[int]) -> None:
        """These buffers are filled by others."""
        left_out = set(indices)
        self._filled = tuple(i for i in self._filled if i not in left_out)
        self.fills = bool(self._filled)
        self._set_targets()

    def disown(self) -> None:
        """Keep addresses only, so that a buffer is free once the captured callable drops it.

        Not those that are read after the replay.
        """
        for i, buffer in self.buffers.items():
            if i not in self._written_back and buffer.numel():
                (self.buffers[i],) = unowned_aliases([buffer])
        self._set_targets()

    def load(self, inputs: Sequence[Any]) -> None:
        """Copy this call's inputs in, in one batch. Call with gradients off."""
        filled = self._filled
        if self._expanded:
            sources = [_without_expansion(inputs[i]) for i in filled]
        else:
            sources = [inputs[i] for i in filled]
        if len(filled) == 1:
            self._targets[0].copy_(sources[0])
        else:
            torch._foreach_copy_(self._targets, sources)

    def write_back(self, inputs: Sequence[Any]) -> None:
        """Give the caller's tensors what the graph wrote into their stand-ins."""
        for i in self._written_back:
            target, written = _without_expansion(inputs[i]), _without_expansion(self.buffers[i])
            if target.is_inference():
                # Compiled kernels write to it in any mode, copy_() in its own only.
                with torch.inference_mode():
                    target.copy_(written)
            else:
                target.copy_(written)
