"""What a replayed callable needs from the device: the GPU, or the host through HostGraph."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import torch
from torch import Tensor

from graphcap_backend.capture.input_copies import InputCopy, capture_copies

if TYPE_CHECKING:
    from graphcap_backend.annotate.config import AnnotationConfig
    from graphcap_backend.capture.session import CaptureSession

ALIGNMENT = 16
"""Bytes. Inductor's kernels assume it of their inputs."""

Range = tuple[int, int]
"""Memory from the first address up to, not including, the second."""


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
    def num_bytes_allocated(self) -> int: ...
    def capture_input_copies(
        self, graph: Any, inputs: Sequence[Any], buffers: dict[int, Tensor], where: str | None
    ) -> list[InputCopy]: ...
    def new_graph(self) -> Any: ...
    def launcher(self, graph: Any) -> Callable[[], None]: ...
    def new_pool(self) -> Any: ...
    def session(self, graph: Any, pool: Any, annotations: AnnotationConfig | None) -> CaptureSession: ...
    def is_captured(self, stream: int) -> bool: ...
    def wait_for_stream(self, stream: int) -> None: ...
    def touched_memory(self, pool: Any) -> contextlib.AbstractContextManager[list[Range]]: ...
    def misaligned(self, inputs: Sequence[Any]) -> list[int]: ...


class CudaDevice:
    """One GPU."""

    shares_memory = True
    _history_lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, index: int) -> None:
        self.torch_device = torch.device("cuda", index)
        self.is_capturing = torch._C._cuda_isCurrentStreamCapturing
        self._index = index
        self.copies_inside = True
        self.current_stream: Callable[[], int] = partial(torch._C._cuda_getCurrentRawStream, index)

    def made_current(self) -> contextlib.AbstractContextManager[Any]:
        # Captures begin on the current device. Replays need no such care: torch takes the device of the graph.
        return torch.cuda.device(self._index)

    def num_bytes_allocated(self) -> int:
        """Bytes allocated since the process began, freed ones included."""
        return int(torch.cuda.memory_stats(self._index).get("allocated_bytes.all.allocated", 0))

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

    @contextlib.contextmanager
    def touched_memory(self, pool: Any) -> Iterator[list[Range]]:
        """Gives a list that holds, on leaving, what was allocated from ``pool`` inside the block.

        The allocator's own history tells. Where somebody else records it, or stopped it meanwhile, theirs is left
        alone, and the answer is all that the pool has: more than was touched, never less.
        """
        touched: list[Range] = []
        with _own_workspaces():
            with self._history_lock:  # captures on several devices share the one history
                recorded_by_others = torch._C._cuda_isHistoryEnabled()
                if not recorded_by_others:
                    record = torch.cuda.memory._record_memory_history
                    record("all", context=None, stacks="python", clear_history=True)
            try:
                yield touched
                whole = recorded_by_others or not torch._C._cuda_isHistoryEnabled()
                snapshot = torch.cuda.memory._snapshot()
            finally:
                if not recorded_by_others:
                    torch.cuda.memory._record_memory_history(None)
        segments = _segments(snapshot, pool)
        if whole:
            touched.extend(segments)
            return
        touched.extend(
            (event["addr"], event["addr"] + event["size"])
            for event in snapshot["device_traces"][self._index]
            if event["action"] == "alloc" and any(first <= event["addr"] < last for first, last in segments)
        )

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

    def num_bytes_allocated(self) -> int:
        """Not known on the host."""
        return 0

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

    def touched_memory(self, pool: Any) -> contextlib.AbstractContextManager[list[Range]]:
        """Host graphs share no memory."""
        return contextlib.nullcontext([])

    def misaligned(self, inputs: Sequence[Any]) -> list[int]:
        return []


@contextlib.contextmanager
def _own_workspaces() -> Iterator[None]:
    """cuBLAS allocates its workspaces inside the block, and keeps none that it allocated there.

    It holds on to a workspace until somebody clears them all, as ``mode="reduce-overhead"`` does. One that an
    earlier capture left in its pool would be written to by this graph, too, and nobody would know.
    """
    torch._C._cuda_clearCublasWorkspaces()
    try:
        yield
    finally:
        torch._C._cuda_clearCublasWorkspaces()


def _segments(snapshot: Any, pool: Any) -> list[Range]:
    wanted = tuple(pool)
    return [
        (segment["address"], segment["address"] + segment["total_size"])
        for segment in snapshot["segments"]
        if tuple(segment["segment_pool_id"]) == wanted
    ]


def device_for(device: torch.device) -> Device:
    """The device object for ``device``; the index must be set for CUDA."""
    if device.type == "cuda":
        return CudaDevice(device.index if device.index is not None else torch.cuda.current_device())
    return HostDevice()
