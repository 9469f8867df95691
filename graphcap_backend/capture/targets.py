"""What a session does on the device: the CUDA side and the host side of one protocol."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any, Protocol

from graphcap_backend.capture import driver
from graphcap_backend.capture.pool import pool_id
from graphcap_backend.capture.process import PROCESS
from graphcap_backend.capture.record import CapturedGraph, CudaKeys, HostKeys
from graphcap_backend.capture.template import ClonedTemplate, KeptTemplate, no_nodes
from graphcap_backend.errors import CaptureError, NestedCaptureError

if TYPE_CHECKING:
    import torch

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

    def prepare(self, undo: UndoStack, *, alone: bool) -> None:
        """Check that a capture may begin, make room, select the stream. ``alone``: no other capture runs."""

    def start_recording(self, config: AnnotationConfig) -> Recording:
        """Begin to record annotations; before the capture begins."""

    def begin(self, recording: Recording | None) -> None:
        """Enter capture mode."""

    def end(self, recording: Recording | None) -> None:
        """Leave capture mode with the captured graph in place."""

    def abort(self) -> None:
        """Leave capture mode, wherever :meth:`begin` or :meth:`end` stopped, with nothing captured."""

    def captured(self, record: GraphRecord | None) -> CapturedGraph:
        """The record of the capture, after :meth:`end`."""


class CudaTarget:
    """Capture into a ``torch.cuda.CUDAGraph``."""

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
        self._began = False

    def prepare(self, undo: UndoStack, *, alone: bool) -> None:
        import torch

        if torch.cuda.is_current_stream_capturing():
            raise NestedCaptureError(
                "the current stream is already being captured, and one capture cannot hold another. End that "
                "capture first; it goes on unharmed"
            )
        if _books_closed(self._graph):
            raise CaptureError("this CUDAGraph holds a captured graph; call reset() on it or capture into a new one")
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

    def end(self, recording: Recording | None) -> None:
        import torch

        with torch.cuda.stream(self._stream):  # the block may have left another one current
            info = driver.capture_info(self._stream.cuda_stream)
            if info.status is driver.CaptureStatus.ACTIVE:
                self.num_nodes = driver.num_nodes(info.graph)
                if self.num_nodes == 0:
                    driver.add_empty_node(info.graph)  # torch would warn; the session does, in better words
                elif not self._keep_graph:
                    self._template = ClonedTemplate(info.graph)
            self._graph.capture_end()
        self.keys = CudaKeys(self._graph, source_graph_id=info.capture_id, keep_graph=self._keep_graph)

    def abort(self) -> None:
        import torch

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
        import torch

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

    def __init__(self, graph: HostGraph, pool: PoolHandle | None, error_mode: str) -> None:
        self._graph = graph
        self._pool = pool
        self._error_mode = error_mode
        self._began = False

    def prepare(self, undo: UndoStack, *, alone: bool) -> None:
        if _books_closed(self._graph):
            raise CaptureError("this HostGraph holds a captured graph; call reset() on it or capture into a new one")

    def start_recording(self, config: AnnotationConfig) -> Recording:
        from graphcap_backend.annotate.recording import Recording

        return Recording.start_host(config)

    def begin(self, recording: Recording | None) -> None:
        self._graph.launch_listener = None if recording is None else recording.on_node
        self._began = True
        self._graph.capture_begin(pool=self._pool, capture_error_mode=self._error_mode)

    def end(self, recording: Recording | None) -> None:
        self._graph.capture_end()
        self._graph.launch_listener = None
        self.num_nodes = len(self._graph.nodes)
        self.keys = HostKeys(self._graph)

    def abort(self) -> None:
        self._graph.launch_listener = None
        if self._began:
            self._graph.abort_capture()
            self._graph.reset()

    def captured(self, record: GraphRecord | None) -> CapturedGraph:
        nodes = self._graph.nodes
        return CapturedGraph(
            self._graph, keys=self.keys, read_nodes=lambda: nodes, num_nodes=self.num_nodes, record=record
        )


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
