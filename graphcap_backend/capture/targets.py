"""What a session does on the device: the CUDA side and the host side of one protocol."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from graphcap_backend.capture import driver
from graphcap_backend.capture.liveness import CheckedReplay, InputWatch
from graphcap_backend.capture.pool import pool_id
from graphcap_backend.capture.process import PROCESS
from graphcap_backend.capture.record import CapturedGraph, CudaKeys, HostKeys
from graphcap_backend.capture.template import ClonedTemplate, KeptTemplate, no_nodes
from graphcap_backend.capture.unjoined import check_joined, unjoined_error
from graphcap_backend.errors import CaptureError, CudaError, NestedCaptureError

if TYPE_CHECKING:
    from graphcap_backend.annotate.config import AnnotationConfig
    from graphcap_backend.annotate.recording import Recording
    from graphcap_backend.annotate.registry import GraphRecord
    from graphcap_backend.capture.host import HostGraph
    from graphcap_backend.capture.pool import PoolHandle
    from graphcap_backend.capture.undo import UndoStack


class Target(Protocol):
    """One graph to be captured, step by step in the order below. Each step may raise."""

    @property
    def keys(self) -> CudaKeys | HostKeys:
        """Identity of the capture; set by :meth:`end`."""

    num_nodes: int
    """Nodes captured; set by :meth:`end`."""
    spoiled_by_first_calls: bool
    """Whether compiling or tuning while capturing breaks the capture."""

    def prepare(self, undo: UndoStack, *, alone: bool) -> None:
        """Check that a capture may begin, make room, select the stream. ``alone``: no other capture runs."""

    def start_recording(self, config: AnnotationConfig) -> Recording:
        """Begin to record annotations; before the capture begins."""

    def begin(self, recording: Recording | None) -> None:
        """Enter capture mode."""

    def watch_inputs(self, named: Sequence[Tensor]) -> InputWatch:
        """A watch for the inputs of this capture, to be started; after :meth:`begin`."""

    def note_cause(self, error: BaseException) -> None:
        """Add to an exception of the block what only the capture's state tells."""

    def check_capturing(self) -> None:
        """Raise CaptureError if the capture cannot be ended well any more."""

    def end(self, recording: Recording | None) -> None:
        """Leave capture mode with the captured graph in place; the watch, if any, has stopped."""

    def abort(self) -> None:
        """Leave capture mode, wherever :meth:`begin` or :meth:`end` stopped, with nothing captured."""

    def captured(self, record: GraphRecord | None) -> CapturedGraph:
        """The record of the capture, after :meth:`end`."""


class CudaTarget:
    """Capture into a ``torch.cuda.CUDAGraph``."""

    spoiled_by_first_calls = True

    def __init__(
        self, graph: torch.cuda.CUDAGraph, pool: Any, stream: torch.cuda.Stream | None, error_mode: str
    ) -> None:
        self._graph = graph
        self._given_pool = pool
        self._pool = pool_id(pool)
        self._given_stream = stream
        self._error_mode = error_mode
        self._keep_graph = _keeps_template(graph)
        self._template: ClonedTemplate | None = None
        self._body_keys: dict[int, int] = {}
        self._watch: InputWatch | None = None
        self._began = False

    def prepare(self, undo: UndoStack, *, alone: bool) -> None:
        if torch.cuda.is_current_stream_capturing():
            raise NestedCaptureError(
                "the current stream is already being captured, and one capture cannot hold another. End that "
                "capture first; it goes on unharmed"
            )
        if _books_closed(self._graph):
            raise CaptureError("this CUDAGraph holds a captured graph; call reset() on it or capture into a new one")
        CheckedReplay.remove(self._graph)
        stream = self._given_stream
        if stream is None:
            stream = PROCESS.side_streams.take(torch.cuda.current_device())
            undo.restore(lambda: PROCESS.side_streams.give_back(stream))
        # torch must not meet such a stream: it fails half-way, and the graph's destructor then ends the process.
        if driver.capture_info(stream.cuda_stream).status is not driver.CaptureStatus.NONE:
            raise CaptureError(f"{stream} is already capturing; end that capture or pass another stream")
        if alone:
            # Synchronizing or freeing here would spoil a capture that another thread has under way.
            torch.cuda.synchronize(stream.device)
            if torch.compiler.config.force_cudagraph_gc:
                gc.collect()
            torch.cuda.empty_cache()
            torch._C._host_emptyCache()
        PROCESS.first_calls.hold()
        undo.restore(PROCESS.first_calls.release)
        context = torch.cuda.stream(stream)
        context.__enter__()  # type: ignore[no-untyped-call]
        undo.restore(lambda: context.__exit__(None, None, None))
        self._stream = stream

    def start_recording(self, config: AnnotationConfig) -> Recording:
        from graphcap_backend.annotate.recording import Recording

        return Recording.start_cuda(config, self._stream.device_index)

    def begin(self, recording: Recording | None) -> None:
        self._began = True
        self._graph.capture_begin(pool=self._pool, capture_error_mode=self._error_mode)  # type: ignore[arg-type]
        if recording is not None:
            recording.bind(driver.capture_info(self._stream.cuda_stream).graph)

    def watch_inputs(self, named: Sequence[Tensor]) -> InputWatch:
        self._watch = InputWatch(_counts_on_cuda, self._num_launches, named)
        return self._watch

    def _num_launches(self) -> int:
        graph = driver.capture_info(self._stream.cuda_stream).graph
        return driver.num_nodes(graph) if graph else 0

    def note_cause(self, error: BaseException) -> None:
        if driver.capture_info(self._stream.cuda_stream).status is driver.CaptureStatus.INVALIDATED:
            error.add_note(f"graphcap: {self._invalidated()}")

    def _invalidated(self) -> str:
        others = (
            ' or, as capture_error_mode is "global", in another thread (allocating, pinning or synchronizing there is '
            'enough; "thread_local" allows it)'
            if self._error_mode == "global"
            else ""
        )
        return (
            f"the capture was invalidated by an operation that is not allowed while a stream is capturing, in the "
            f"captured block{others}"
        )

    def check_capturing(self) -> None:
        status = driver.capture_info(self._stream.cuda_stream).status
        if status is driver.CaptureStatus.INVALIDATED:
            raise CaptureError(self._invalidated())
        if status is driver.CaptureStatus.NONE:
            raise CaptureError(f"{self._stream} is not capturing any more; somebody else ended the capture")

    def end(self, recording: Recording | None) -> None:
        with torch.cuda.stream(self._stream):  # the block may have left another one current
            info = driver.capture_info(self._stream.cuda_stream)
            self.num_nodes = driver.num_nodes(info.graph)
            if self.num_nodes == 0:
                driver.add_empty_node(info.graph)  # torch would warn; the session does, in better words
            elif not self._keep_graph:
                self._template = ClonedTemplate(info.graph)
            if recording is not None and self.num_nodes:  # the node added above is joined to nothing
                check_joined(info, recording)
                if recording.by_source:
                    self._body_keys = _body_keys(info.graph)
            try:
                self._graph.capture_end()
            except RuntimeError as error:
                if "unjoined work" in str(error):
                    raise unjoined_error() from error
                raise
        self.keys = CudaKeys(self._graph, source_graph_id=info.capture_id, keep_graph=self._keep_graph)

    def abort(self) -> None:
        if self._template is not None:
            self._template.drop()
        if not self._began:
            return
        stream = self._stream.cuda_stream
        with torch.cuda.stream(self._stream):
            driver.drop_capture(stream)
            if not _books_closed(self._graph):
                self._close_books(stream)
            self._graph.reset()

    def _close_books(self, stream: int) -> None:
        """Make torch end a capture that it can no longer end: with an empty one in its place.

        When the driver ends a capture with an error, torch's ``capture_end`` stops half-way and leaves
        the allocator's routing, the pool's use count and the generator's capturing flag behind.
        """
        driver.begin_empty_capture(stream)
        cuda_graph: Any = torch._C._CUDAGraph  # past any hook or override that may have failed just now
        end = getattr(cuda_graph, "capture_end_pre", None) or cuda_graph.capture_end
        try:
            end(self._graph)
        except RuntimeError:
            pass  # capture_begin had not come far enough for torch to have anything to close
        finally:
            driver.drop_capture(stream)

    def captured(self, record: GraphRecord | None) -> CapturedGraph:
        if self._watch is not None:
            segments = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
            self._watch.sort_out(segments, tuple(self._graph.pool()))
            CheckedReplay(self._graph, self._watch, self.keys.alive)
        if record is not None:
            record.add_body_keys(self._body_keys)
        if self.num_nodes == 0:
            read_nodes: Any = no_nodes
        else:
            read_nodes = KeptTemplate(self._graph) if self._template is None else self._template
        return CapturedGraph(
            self._graph,
            keys=self.keys,
            read_nodes=read_nodes,
            num_nodes=self.num_nodes,
            record=record,
            keep=self._given_pool,
        )


class HostTarget:
    """Capture into a :class:`HostGraph`."""

    spoiled_by_first_calls = False

    def __init__(self, graph: HostGraph, pool: PoolHandle | None, error_mode: str) -> None:
        self._graph = graph
        self._pool = pool
        self._error_mode = error_mode
        self._watch: InputWatch | None = None
        self._began = False

    def prepare(self, undo: UndoStack, *, alone: bool) -> None:
        if _books_closed(self._graph):
            raise CaptureError("this HostGraph holds a captured graph; call reset() on it or capture into a new one")
        CheckedReplay.remove(self._graph)

    def start_recording(self, config: AnnotationConfig) -> Recording:
        from graphcap_backend.annotate.recording import Recording

        return Recording.start_host(config)

    def watch_inputs(self, named: Sequence[Tensor]) -> InputWatch:
        def num_launches() -> int:
            recorder = HostRecorder.on_this_thread()
            return 0 if recorder is None else len(recorder.launches)

        from graphcap_backend.capture.host_recorder import HostRecorder

        self._watch = InputWatch(lambda tensor: tensor.device.type == "cpu", num_launches, named)
        return self._watch

    def note_cause(self, error: BaseException) -> None:
        pass  # the host's own errors say it all

    def check_capturing(self) -> None:
        pass  # capture_end tells

    def begin(self, recording: Recording | None) -> None:
        self._graph.launch_listener = None if recording is None else recording.on_node
        self._began = True
        self._graph.capture_begin(pool=self._pool, capture_error_mode=self._error_mode)

    def end(self, recording: Recording | None) -> None:
        if self._watch is not None:
            self._name_inputs(self._watch)
        self._graph.capture_end()
        self._graph.launch_listener = None
        self.num_nodes = len(self._graph.nodes)
        self.keys = HostKeys(self._graph)

    def abort(self) -> None:
        self._graph.launch_listener = None
        if self._began:
            self._graph.abort_capture()
            self._graph.reset()

    def _name_inputs(self, watch: InputWatch) -> None:
        """The recorder knows what is from outside, also for compiled kernels; the graph holds it, too."""
        from graphcap_backend.capture.host_recorder import HostRecorder

        recorder = HostRecorder.on_this_thread()
        outside = [] if recorder is None else recorder.outside_memory()
        watch.keep_only(tensor.untyped_storage()._cdata for tensor, _ in outside)
        for tensor, num_holders in outside:
            watch.use(tensor, num_own_holders=num_holders)

    def captured(self, record: GraphRecord | None) -> CapturedGraph:
        if self._watch is not None:
            CheckedReplay(self._graph, self._watch, self.keys.alive)
        nodes = self._graph.nodes
        return CapturedGraph(
            self._graph, keys=self.keys, read_nodes=lambda: nodes, num_nodes=self.num_nodes, record=record
        )


def _body_keys(cuda_graph: int) -> dict[int, int]:
    """Source keys of nodes in bodies; read before the capture ends, since torch may not keep the graph."""
    from graphcap_backend.capture.cuda_nodes import read_body_ids

    try:
        return read_body_ids(cuda_graph)
    except CudaError as error:
        warnings.warn(f"nodes inside child graphs and conditionals have no keys: {error}", RuntimeWarning, stacklevel=2)
        return {}


def _counts_on_cuda(tensor: Tensor) -> bool:
    return tensor.is_cuda or (tensor.device.type == "cpu" and tensor.is_pinned())


def _books_closed(graph: Any) -> bool:
    """Whether ``graph`` holds the result of a capture: only then does it have a pool to tell of."""
    try:
        graph.pool()
    except RuntimeError:
        return False
    return True


def _keeps_template(graph: Any) -> bool:
    """keep_graph, which torch before 2.13 tells only through the wording of an error."""
    keep = getattr(graph, "_keep_graph", None)
    if keep is not None:
        return bool(keep)
    try:
        graph.raw_cuda_graph()
    except RuntimeError as error:
        return "keep_graph=true" not in str(error)
    return True
