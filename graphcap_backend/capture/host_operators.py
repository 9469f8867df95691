"""What an operator means to a host capture: a launch, bookkeeping, or impossible."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import Enum, auto
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from graphcap_backend.capture.host_memory import tensors_in
from graphcap_backend.errors import CaptureError

if TYPE_CHECKING:
    from torch._ops import OpOverload

_ALLOCATIONS = frozenset(
    f"aten::{name}"
    for name in ("empty", "empty_like", "empty_strided", "empty_permuted", "new_empty",
                 "new_empty_strided")
)  # fmt: skip
_CONSTANTS = frozenset({"aten::lift_fresh", "aten::lift"})
_CHANGE_STORAGE = frozenset({"aten::resize_", "aten::resize_as_", "aten::set_", "inductor::resize_storage_bytes_"})
# Operators whose schema does not say that they write: argument names.
_UNDECLARED_WRITES = {
    "aten::native_batch_norm": ("running_mean", "running_var"),
    "aten::_batch_norm_impl_index": ("running_mean", "running_var"),
}
_RANDOM_STATE = frozenset({"run_and_save_rng_state", "run_with_rng_state", "graphsafe_run_with_rng_state"})
_CONTROL_FLOW = frozenset({"cond", "while_loop", "while_loop_stack_output"})


class Role(Enum):
    """How the recorder treats an operator."""

    LAUNCH = auto()
    METADATA = auto()
    """Views and the like: no node, run as it is."""
    ALLOCATION = auto()
    """No node; the memory is the capture's own."""
    CONSTANT = auto()
    """Lifts a tensor made from Python data."""
    COMPOSITE = auto()
    """Made of other operators, which are recorded in its place."""
    PYTHON = auto()
    """Implemented in Python, which replays must not run: record what it calls."""


def role_of(func: OpOverload) -> Role:
    """How to treat ``func``."""
    schema = func._schema
    if schema.name in _ALLOCATIONS:
        return Role.ALLOCATION if not schema.is_mutable else Role.METADATA
    if schema.name in _CONSTANTS:
        return Role.CONSTANT
    if schema.name in _CHANGE_STORAGE or torch.Tag.inplace_view in func.tags:
        return Role.METADATA
    if func._can_decompose():
        return Role.COMPOSITE
    if not schema.is_mutable and _is_view(schema):
        return Role.METADATA
    if _is_python(func):
        return Role.PYTHON
    return Role.LAUNCH


def _is_view(schema: Any) -> bool:
    """Every result aliases an argument."""
    return bool(schema.returns) and all(r.alias_info is not None for r in schema.returns)


def _is_python(func: OpOverload) -> bool:
    # torch keeps the names of what was registered from Python in this set.
    registered: set[str] = torch.library._impls
    overload = func._schema.overload_name
    name = func._schema.name.replace("::", "/") + (f".{overload}" if overload else "")
    return any(f"{name}/{key}" in registered for key in ("CPU", "CompositeExplicitAutograd"))


def written_arguments(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """The tensors among the arguments that ``func`` writes to."""
    schema = func._schema
    undeclared = _UNDECLARED_WRITES.get(schema.name, ())
    if not schema.is_mutable and not undeclared:
        return []
    written: list[Tensor] = []
    for position, argument in enumerate(schema.arguments):
        alias = argument.alias_info
        if (alias is not None and alias.is_write) or argument.name in undeclared:
            at_position = args[position] if position < len(args) else None
            written += tensors_in(kwargs.get(argument.name, at_position))
    return written


def refuse_uncapturable(
    func: OpOverload,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    is_born: Callable[[Tensor], bool],
) -> None:
    """Raise when a replay of ``func`` could not repeat what happens now.

    Raises:
        CaptureError: with the operator and what to do instead.
    """
    tensors = tensors_in((tuple(args), dict(kwargs)))
    refuse_other_memory(func, tensors)
    if kwargs.get("device") is not None:
        _refuse_device(func, torch.device(kwargs["device"]))
    name = func._schema.name
    if name in _CHANGE_STORAGE:
        target = args[0]
        same_shape = name == "aten::resize_" and tuple(args[1]) == tuple(target.shape)
        if isinstance(target, Tensor) and not is_born(target) and not same_shape:
            raise CaptureError(
                f"{func} changes the memory of a tensor from outside the capture, which a "
                "replay cannot repeat; do it before the capture begins"
            )
    if _depends_on_data(func, args, kwargs, tensors):
        raise CaptureError(
            f"{func} cannot be captured: what the program does next depends on the values of "
            "a tensor (.item(), bool(), nonzero, boolean masks, unique). A replay runs no "
            "Python; use torch.where or a fixed size, or keep it out of the capture"
        )


def higher_order_refusal(name: str) -> str:
    """Why the higher-order operator ``name``, which reached a capture as such, is not captured, and what to do."""
    refused = f"the higher-order operator {name} cannot be captured into a HostGraph, whose replays run no Python"
    if name in _RANDOM_STATE:
        return (
            f"{refused}: it saves or restores the random state, so that torch.utils.checkpoint draws dropout's numbers "
            "again. Nothing can be done on the CPU: compiled code runs uncaptured; with dropout at 0 it is captured"
        )
    if name in _CONTROL_FLOW:
        return (
            f"{refused}: which way it goes depends on values, compiled or not. Use torch.where, a fixed number of "
            "steps, or keep it out of the capture"
        )
    return f"{refused}. Call it in a compiled function (flex_attention is kernels there), or keep it out of the capture"


def refuse_other_memory(func: OpOverload, tensors: Sequence[Tensor]) -> None:
    """Raise for tensors that are not plain CPU memory; meta tensors have none and may pass.

    Raises:
        CaptureError: with the operator, and the device or layout found.
    """
    for tensor in tensors:
        _refuse_device(func, tensor.device)
        if tensor.layout != torch.strided or tensor.is_nested or tensor.is_quantized:
            raise CaptureError(
                f"{func} uses a {_layout(tensor)} tensor; a HostGraph captures plain strided tensors only"
            )


def _refuse_device(func: OpOverload, device: torch.device) -> None:
    if device.type not in ("cpu", "meta"):
        raise CaptureError(
            f"{func} uses a tensor on {device}; a HostGraph captures work on CPU tensors only. "
            "Capture CUDA work into a torch.cuda.CUDAGraph"
        )


def _layout(tensor: Tensor) -> str:
    if tensor.is_nested:
        return "nested"
    return "quantized" if tensor.is_quantized else str(tensor.layout).removeprefix("torch.")


def _depends_on_data(
    func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], tensors: Sequence[Tensor]
) -> bool:
    name = func._schema.name
    if name == "aten::_local_scalar_dense" or torch.Tag.data_dependent_output in func.tags:
        return not all(t.device.type == "meta" for t in tensors)
    if torch.Tag.dynamic_output_shape not in func.tags:
        return False
    if name == "aten::index":  # dynamic only through masks
        return any(t.dtype in (torch.bool, torch.uint8) for t in tensors_in(args[1]))
    if name == "aten::repeat_interleave":
        return kwargs.get("output_size") is None
    return True
