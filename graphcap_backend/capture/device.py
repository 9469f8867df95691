"""What a replayed callable needs from the device: the GPU, or the host through HostGraph."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from graphcap_backend.capture.allocator import (
    FreeBlock,
    TouchedMemory,
    can_tell_what_is_touched,
    free_blocks,
    gives_what_is_asked_for,
    retain_pool,
    touched_memory,
)
from graphcap_backend.capture.input_copies import InputCopy, capture_copies

if TYPE_CHECKING:
    from graphcap_backend.annotate.config import AnnotationConfig
    from graphcap_backend.capture.session import CaptureSession

ALIGNMENT = 16
"""Bytes. Inductor's kernels assume it of their inputs."""


class Device(Protocol):
    """One device that callables are captured on."""

    torch_device: torch.device

    @property
    def is_capturing(self) -> Callable[[], bool]:
        """Tells whether the current stream (on the host: this thread) is inside somebody's capture."""

    @property
    def current_stream(self) -> Callable[[], int]:
        """Tells the raw handle of the current stream; one number on the host."""

    shares_memory: bool
    """Whether graphs share a pool: input buffers come from it."""

    copies_inside: bool
    """Whether inputs may be copied by nodes of the graph."""

    def made_current(self) -> contextlib.AbstractContextManager[Any]: ...
    def capture_input_copies(
        self, graph: Any, inputs: Sequence[Any], buffers: dict[int, Tensor], where: str | None
    ) -> list[InputCopy]: ...
    def new_graph(self) -> Any: ...
    def launcher(self, graph: Any) -> Callable[[], None]: ...
    def new_pool(self) -> Any: ...
    def session(self, graph: Any, pool: Any, annotations: AnnotationConfig | None) -> CaptureSession: ...
    def is_captured(self, stream: int) -> bool: ...
    def wait_for_stream(self, stream: int) -> None: ...
    def touched_memory(self, pool: Any) -> contextlib.AbstractContextManager[TouchedMemory]: ...
    def may_share_outputs(self) -> bool: ...
    def retain_pool(self, pool: Any, owner: object) -> None: ...
    def free_blocks(self, pool: Any) -> list[FreeBlock]: ...
    def misaligned(self, inputs: Sequence[Any]) -> list[int]: ...


class CudaDevice:
    """One GPU."""

    shares_memory = True

    def __init__(self, index: int) -> None:
        self.torch_device = torch.device("cuda", index)
        self.is_capturing = torch._C._cuda_isCurrentStreamCapturing
        self._index = index
        self.copies_inside = True
        self.current_stream: Callable[[], int] = partial(torch._C._cuda_getCurrentRawStream, index)

    def made_current(self) -> contextlib.AbstractContextManager[Any]:
        # Captures begin on the current device. Replays need no such care: torch takes the device of the graph.
        return torch.cuda.device(self._index)

    def capture_input_copies(
        self, graph: Any, inputs: Sequence[Any], buffers: dict[int, Tensor], where: str | None
    ) -> list[InputCopy]:
        return capture_copies(inputs, buffers, graph, where) if self.copies_inside else []

    def new_graph(self) -> torch.cuda.CUDAGraph:
        # The template stays, so that nodes can be read when somebody asks.
        return torch.cuda.CUDAGraph(keep_graph=True)

    def launcher(self, graph: torch.cuda.CUDAGraph) -> Callable[[], None]:
        # Past torch's Python method, which only calls this one.
        launch: Callable[[], None] = partial(torch._C._CUDAGraph.replay, graph)
        return launch

    def new_pool(self) -> Any:
        return torch.cuda.graph_pool_handle()

    def session(self, graph: Any, pool: Any, annotations: AnnotationConfig | None) -> CaptureSession:
        from graphcap_backend.capture.session import CaptureSession

        # "thread_local": what other threads of the user's program do is no part of this capture.
        return CaptureSession(
            graph, pool=pool, capture_error_mode="thread_local", annotations=annotations, warn_if_empty=False
        )

    def is_captured(self, stream: int) -> bool:
        """Whether somebody is capturing ``stream``."""
        from graphcap_backend.capture.driver import CaptureStatus, capture_info

        return capture_info(stream).status is not CaptureStatus.NONE

    def wait_for_stream(self, stream: int) -> None:
        """Make the current stream wait for what ``stream`` was given so far."""
        earlier = torch.cuda.ExternalStream(stream, device=self.torch_device)  # type: ignore[no-untyped-call]
        torch.cuda.current_stream(self.torch_device).wait_stream(earlier)

    def touched_memory(self, pool: Any) -> contextlib.AbstractContextManager[TouchedMemory]:
        return touched_memory(pool, self._index)

    def may_share_outputs(self) -> bool:
        """Whether a shared pool can be used now: what graphs write to must be known exactly."""
        return can_tell_what_is_touched() and gives_what_is_asked_for()

    def retain_pool(self, pool: Any, owner: object) -> None:
        retain_pool(pool, self._index, owner)

    def free_blocks(self, pool: Any) -> list[FreeBlock]:
        return free_blocks(pool)

    def misaligned(self, inputs: Sequence[Any]) -> list[int]:
        """Inputs that Inductor's kernels must not get: they assume 16-byte alignment."""
        return [i for i, value in enumerate(inputs) if isinstance(value, Tensor) and value.data_ptr() % ALIGNMENT]


class HostDevice:
    """The CPU, captured into a HostGraph."""

    shares_memory = False
    copies_inside = False

    def __init__(self) -> None:
        self.torch_device = torch.device("cpu")

    @staticmethod
    def is_capturing() -> bool:
        from graphcap_backend.capture.host_recorder import HostRecorder

        return HostRecorder.on_this_thread() is not None

    def made_current(self) -> contextlib.AbstractContextManager[Any]:
        """The host is one device."""
        return contextlib.nullcontext()

    def capture_input_copies(
        self, graph: Any, inputs: Sequence[Any], buffers: dict[int, Tensor], where: str | None
    ) -> list[InputCopy]:
        """A host graph has no memcpy nodes."""
        return []

    def new_graph(self) -> Any:
        from graphcap_backend.capture.host import HostGraph

        return HostGraph(keep_graph=True)

    def launcher(self, graph: Any) -> Callable[[], None]:
        launch: Callable[[], None] = graph.replay
        return launch

    def new_pool(self) -> Any:
        return None

    def session(self, graph: Any, pool: Any, annotations: AnnotationConfig | None) -> CaptureSession:
        from graphcap_backend.capture.session import CaptureSession

        return CaptureSession(graph, annotations=annotations, warn_if_empty=False)

    @staticmethod
    def current_stream() -> int:
        return 0

    @staticmethod
    def is_captured(stream: int) -> bool:
        return False

    def wait_for_stream(self, stream: int) -> None:
        """The host has one stream."""

    def touched_memory(self, pool: Any) -> contextlib.AbstractContextManager[TouchedMemory]:
        """Host graphs share no memory."""
        return contextlib.nullcontext(TouchedMemory())

    def may_share_outputs(self) -> bool:
        """Host graphs share no memory."""
        return False

    def retain_pool(self, pool: Any, owner: object) -> None:
        """Nothing to keep."""

    def free_blocks(self, pool: Any) -> list[FreeBlock]:
        """Nothing that is known."""
        return []

    def misaligned(self, inputs: Sequence[Any]) -> list[int]:
        return []


def device_for(device: torch.device) -> Device:
    """The device object for ``device``; the index must be set for CUDA."""
    if device.type == "cuda":
        return CudaDevice(device.index if device.index is not None else torch.cuda.current_device())
    return HostDevice()
