"""One capture, from entering to leaving: the session."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from enum import StrEnum
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from graphcap_backend.capture.pool import pool_id
from graphcap_backend.capture.process import PROCESS
from graphcap_backend.capture.targets import CudaTarget, HostTarget, Target
from graphcap_backend.capture.undo import UndoStack
from graphcap_backend.errors import CaptureError, NotWarmedUpError

if TYPE_CHECKING:
    from graphcap_backend.annotate.config import AnnotationConfig
    from graphcap_backend.annotate.recording import Recording
    from graphcap_backend.capture.liveness import InputWatch
    from graphcap_backend.capture.record import CapturedGraph

ERROR_MODES = ("global", "thread_local", "relaxed")


class SessionState(StrEnum):
    """Where a session is.

    ::

        new --enter--> capturing --exit--> captured
         |                 |
         '--error--> failed <--error, or exception of the block
    """

    NEW = "new"
    CAPTURING = "capturing"
    CAPTURED = "captured"
    FAILED = "failed"


class CaptureSession:
    """A context manager that captures its block into a graph. What :class:`graph` wraps.

    Every step entered is undone in reverse when a later one, or the block, fails: the stream, the
    device, the allocator, torch's generators, the garbage collector and the annotation tables are as
    before, the graph is empty, and the first exception is the one raised. A session captures once.

    Args:
        graph: a ``torch.cuda.CUDAGraph`` or :class:`HostGraph` that holds no capture.
        annotations: what to record; None records nothing.
        liveness_inputs: with ``check_input_liveness``, tensors to watch besides those that operators
            inside the block are seen to read: what a compiled region reads is known to its owner only.

    Raises:
        TypeError, ValueError: an argument is not what it must be.
        CaptureError: ``graph`` is a CUDA graph and there is no CUDA.
    """

    def __init__(
        self,
        graph: Any,
        *,
        pool: Any = None,
        stream: torch.cuda.Stream | None = None,
        capture_error_mode: str = "global",
        annotations: AnnotationConfig | None = None,
        check_input_liveness: bool = False,
        liveness_inputs: Sequence[Tensor] = (),
        warn_if_empty: bool = True,
    ) -> None:
        self._target = _target(graph, pool, stream, capture_error_mode)
        self._graph = graph
        self._warn_if_empty = warn_if_empty
        self._pool = pool
        self._annotations = annotations
        self._watched = tuple(liveness_inputs) if check_input_liveness else None
        self._watch: InputWatch | None = None
        self._refused: NotWarmedUpError | None = None
        self._state = SessionState.NEW
        self._undo = UndoStack()
        self._recording: Recording | None = None
        self._captured: CapturedGraph | None = None

    @property
    def state(self) -> SessionState:
        """Where this session is."""
        return self._state

    @property
    def captured(self) -> CapturedGraph:
        """The capture, once the block has ended well.

        Raises:
            CaptureError: it has not.
        """
        if self._captured is None:
            raise CaptureError(f"there is no captured graph: this capture is {self._state}, expected captured")
        return self._captured

    def __enter__(self) -> CaptureSession:
        if self._state is not SessionState.NEW:
            raise CaptureError(f"a capture session runs once, and this one is {self._state}; make a new one")
        PROCESS.check_not_nested()
        try:
            with PROCESS.lock:
                self._begin()
        except BaseException as error:
            self._fail(error)
            raise
        self._state = SessionState.CAPTURING
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._undo.on_failure(lambda: self._target.note_cause(error))
            self._fail(error)
            refused = self._refused
            if refused is not None and error is not refused and str(refused) in str(error):
                raise refused from error  # Dynamo had wrapped it into an error of its own
            return
        try:
            with PROCESS.lock:
                self._end()
        except BaseException as failure:
            self._fail(failure)
            raise
        self._state = SessionState.CAPTURED
        if self._warn_if_empty and self.captured.num_nodes == 0:
            warnings.warn(
                "the capture recorded no node: nothing in its block ran on the captured device and stream. Was the "
                "work on another device, on the CPU, or on a stream that is not part of the capture?",
                stacklevel=3,
            )

    def _begin(self) -> None:
        undo, target = self._undo, self._target
        PROCESS.enter(self)
        undo.restore(lambda: PROCESS.leave(self))
        target.prepare(undo, alone=PROCESS.num_active == 1)
        PROCESS.garbage.hold()
        undo.restore(PROCESS.garbage.release)
        undo.on_failure(target.abort)
        if self._annotations is not None:
            self._recording = target.start_recording(self._annotations)
            undo.on_failure(self._recording.discard)  # before the abort, while the stream still captures
        target.begin(self._recording)
        if self._watched is not None:
            self._watch = target.watch_inputs(self._watched)
            undo.restore(self._watch.stop)
            self._watch.start()

    def _end(self) -> None:
        recording, target = self._recording, self._target
        if self._watch is not None:
            self._watch.stop()
        target.check_capturing()  # stopping a recording looks at the nodes, which an invalid capture has lost
        if recording is not None:
            recording.stop()
        target.end(recording)
        record = None if recording is None else recording.seal(target.keys)
        self._captured = target.captured(record)
        self._undo.succeed()

    def refuse_first_call(self, what: str) -> None:
        """Raise NotWarmedUpError where ``what`` is about to spoil this capture."""
        if self._target.spoiled_by_first_calls:
            self._refused = NotWarmedUpError(
                f"{what}, and that cannot be done while a stream is capturing. Call the function once before the "
                "capture, with inputs of the same shapes and in the same modes"
            )
            raise self._refused

    def _fail(self, error: BaseException) -> None:
        self._state = SessionState.FAILED
        self._captured = None
        with PROCESS.lock:
            self._undo.fail(error)


def _target(graph: Any, pool: Any, stream: Any, error_mode: str) -> Target:
    from graphcap_backend.capture.host import HostGraph

    if not isinstance(graph, (torch.cuda.CUDAGraph, HostGraph)):
        hint = ", found the class itself: make one" if graph in (torch.cuda.CUDAGraph, HostGraph) else ""
        raise TypeError(
            "cuda_graph must be a torch.cuda.CUDAGraph, or a graphcap_backend.HostGraph where there is no GPU"
            + (hint or f"; found {type(graph).__name__}")
        )
    if error_mode not in ERROR_MODES:
        raise ValueError(f"capture_error_mode must be one of {list(ERROR_MODES)}, found {error_mode!r}")
    token = pool_id(pool)
    if stream is not None and not isinstance(stream, torch.cuda.Stream):
        raise TypeError(f"stream must be a torch.cuda.Stream or None, found {type(stream).__name__}")
    if isinstance(graph, HostGraph):
        if stream is not None:
            raise ValueError("a HostGraph records what runs on the CPU; stream must be None")
        return HostTarget(graph, token, error_mode)
    if not torch.cuda.is_available():
        raise CaptureError(
            f"capturing into a torch.cuda.CUDAGraph needs CUDA, and torch {torch.__version__} finds no usable GPU "
            "here. To capture work on CPU tensors, pass a graphcap_backend.HostGraph() instead"
        )
    if stream is not None and stream == torch.cuda.default_stream(stream.device):
        raise ValueError("stream must not be the default stream, which cannot be captured; pass another or None")
    return CudaTarget(graph, pool, stream, error_mode)
