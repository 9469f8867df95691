"""One recorded launch of a host capture, and the node that describes it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from graphcap_backend.capture.host_memory import tensors_in
from graphcap_backend.capture.nodes import Memcpy, Memset, Node, NodeKind
from graphcap_backend.errors import CaptureError

_COPIES = ("aten::copy_", "aten::clone", "aten::_to_copy", "aten::lift_fresh")
_ZEROS = ("aten::zero_", "aten::zeros", "aten::zeros_like", "aten::new_zeros")
_FILLS = ("aten::fill_", "aten::full", "aten::full_like", "aten::new_full", "aten::ones",
          "aten::ones_like", "aten::new_ones")  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """What one node runs. It holds the memory that it reads and writes."""

    function: Callable[..., Any]
    args: Sequence[Any]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    outputs: tuple[tuple[int, Tensor], ...] = ()
    """Position in the flat result, and the buffer that keeps it."""
    node: Node

    def __call__(self) -> None:
        """Run once, under ``plain_kernels``.

        Raises:
            CaptureError: a result has another shape than at capture.
        """
        result = self.function(*self.args, **self.kwargs)
        if not self.outputs:
            return
        values = tensors_in(result)
        for position, buffer in self.outputs:
            value = values[position]
            if value.shape != buffer.shape:
                raise CaptureError(
                    f"{self.node.name} gave shape {tuple(value.shape)} in a replay and "
                    f"{tuple(buffer.shape)} at capture: a result whose shape depends on data "
                    "cannot be captured; keep this operator out of the capture"
                )
            _keep(value, buffer)


def _keep(value: Tensor, buffer: Tensor) -> None:
    if not _overlaps(buffer):
        buffer.copy_(value)
        return
    # One address under several indices: copy the memory itself, both have the same layout.
    size = min(value.untyped_storage().nbytes(), buffer.untyped_storage().nbytes())
    _bytes_of(buffer, size).copy_(_bytes_of(value, size))


def _overlaps(tensor: Tensor) -> bool:
    return any(stride == 0 and size > 1 for size, stride in zip(tensor.size(), tensor.stride(), strict=True))


def _bytes_of(tensor: Tensor, size: int) -> Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage(), 0, (size,), (1,))


def describe(index: int, name: str, operator: str, arguments: Sequence[Any], written: Sequence[Tensor]) -> Node:
    """The node of a launch of ``operator`` ("aten::add_", or "" for a compiled kernel).

    ``written`` are the tensors the launch fills. Each node depends on the one before it:
    what one CUDA stream would show.
    """
    kind, memcpy, memset = NodeKind.KERNEL, None, None
    target = written[0] if len(written) == 1 else None
    if target is not None and operator in _COPIES:
        source = tensors_in(arguments)[-1 if operator == "aten::copy_" else 0]
        if _same_layout(source, target):
            kind = NodeKind.MEMCPY
            memcpy = Memcpy(source="host", destination="host", num_bytes=target.nbytes)
    elif target is not None and operator in _ZEROS + _FILLS and _is_dense(target):
        value = 0 if operator in _ZEROS else _fill_value(operator, arguments)
        if value == 0:
            kind, memset = NodeKind.MEMSET, Memset(
                value=0, element_bytes=1, num_bytes=target.nbytes
            )  # fmt: skip
        elif value is not None and not (target.is_floating_point() or target.is_complex()):
            kind, memset = NodeKind.MEMSET, Memset(
                value=value, element_bytes=target.element_size(), num_bytes=target.nbytes
            )  # fmt: skip
    return Node(
        index=index,
        kind=kind,
        name=name,
        dependencies=(index - 1,) if index else (),
        memcpy=memcpy,
        memset=memset,
    )


def _same_layout(source: Tensor, target: Tensor) -> bool:
    return (
        source.dtype == target.dtype
        and source.shape == target.shape
        and source.stride() == target.stride()
        and source.is_conj() == target.is_conj()
        and source.is_neg() == target.is_neg()
        and _is_dense(target)
    )


def _is_dense(tensor: Tensor) -> bool:
    """Its elements fill one stretch of memory, each address once."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.size(), strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


def _fill_value(operator: str, arguments: Sequence[Any]) -> int | None:
    if "ones" in operator:
        return 1
    if len(arguments) < 2:
        return None
    value = arguments[-1] if operator == "aten::fill_" else arguments[1]
    if operator == "aten::new_full":
        value = arguments[2]
    if isinstance(value, Tensor):
        return None
    return int(value) if isinstance(value, (bool, int)) or value == 0 else None
