"""HostGraph: a graph for machines without a GPU, with the methods of ``torch.cuda.CUDAGraph``."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, ClassVar

from graphcap_backend.capture.nodes import NodeList
from graphcap_backend.errors import CaptureError, GraphcapError, NestedCaptureError, NotWarmedUpError

if TYPE_CHECKING:
    from graphcap_backend.capture.host_launch import Launch
    from graphcap_backend.capture.host_recorder import HostRecorder

PoolToken = tuple[int, int]

_ERROR_MODES = ("global", "thread_local", "relaxed")


class HostGraph:
    """Records what runs on CPU tensors of one thread, and replays exactly those launches.

    As on CUDA a capture executes nothing that can be seen outside: tensors from outside keep
    their values, random generators their state. Tensors made inside are the graph's buffers;
    each replay fills them, reading the memory of the inputs as it is then, and no Python of the
    captured code runs again. Launches are ATen operators and, for functions compiled by
    Inductor for the CPU, the generated kernels and extern calls. Inputs, once read by a launch,
    live as long as the graph.

    States: empty -> ``capture_begin`` -> capturing -> ``capture_end`` -> captured; ``reset``
    and ``abort_capture`` lead back to empty. Replays from several threads run one at a time.

    Args:
        keep_graph: as in ``torch.cuda.CUDAGraph``: ``instantiate`` may be called, and again.
    """

    # Far above the ids that CUPTI counts from 1, so that keys of both kinds never meet.
    _ids: ClassVar[itertools.count[int]] = itertools.count(1 << 30)

    def __init__(self, keep_graph: bool = False) -> None:
        self.launch_listener: Callable[[int, int], None] | None = None
        """Called with (0, node index) at each launch recorded; set it before a capture."""
        self.launch_timer: Callable[[int, int], None] | None = None
        """Called with (node index, nanoseconds) behind each launch that a replay runs."""
        self._keep_graph = keep_graph
        self._lock = threading.Lock()
        self._recorder: HostRecorder | None = None
        self._patches = ExitStack()
        self._clear()

    def _clear(self) -> None:
        self._launches: Sequence[Launch] | None = None
        self._nodes = NodeList(())
        self._pool: PoolToken | None = None
        self.graph_id = 0
        """Id of this capture, new for each; 0 while nothing is captured."""
        self.exec_id: int | None = None
        """Id of the instance that replays, new for each ``instantiate``; None without one."""

    @property
    def keep_graph(self) -> bool:
        """Whether the captured graph stays to be instantiated by the caller."""
        return self._keep_graph

    @property
    def nodes(self) -> NodeList:
        """The captured nodes; empty while nothing is captured."""
        return self._nodes

    def capture_begin(self, pool: PoolToken | None = None, capture_error_mode: str = "global") -> None:
        """Record what this thread runs from now on.

        ``pool`` is the token of another graph, which this one then gives as its own; host
        buffers are not shared. ``capture_error_mode`` has no effect on the host.

        Raises:
            NestedCaptureError: this thread is in another capture, or this graph is in one.
            CaptureError: this graph holds a capture; call ``reset()`` first.
        """
        from graphcap_backend.capture.host_recorder import HostRecorder
        from graphcap_backend.inductor import host_kernels_recorded

        _check_pool(pool)
        if capture_error_mode not in _ERROR_MODES:
            raise ValueError(f"capture_error_mode is {capture_error_mode!r}; expected one of {_ERROR_MODES}")
        if self._recorder is not None or HostRecorder.on_this_thread() is not None:
            raise NestedCaptureError("a capture was begun inside another one; end the first before the next begins")
        if self._launches is not None:
            raise CaptureError("this HostGraph holds a captured graph; call reset() before it captures again")
        recorder = HostRecorder(self.launch_listener)
        with ExitStack() as patches:
            patches.enter_context(host_kernels_recorded(recorder))
            recorder.start()
            self._patches = patches.pop_all()
        self._recorder = recorder
        self.graph_id = next(self._ids)
        self._pool = pool if pool is not None else (self.graph_id, 0)

    def capture_end(self) -> None:
        """Stop recording; with ``keep_graph=False`` the graph can be replayed now.

        Raises:
            CaptureError: no capture is on, it runs on another thread, or something in it could
                not be captured; the graph is empty then.
        """
        try:
            recorder = self._leave_capture("capture_end()")
        except NotWarmedUpError:
            self._clear()
            raise
        if recorder.failure is not None:
            self._clear()
            raise CaptureError(f"the capture is not valid: {recorder.failure}") from recorder.failure
        self._launches = recorder.launches
        self._nodes = NodeList([launch.node for launch in recorder.launches])
        if not self._keep_graph:
            self.exec_id = next(self._ids)

    def abort_capture(self) -> None:
        """Leave capture mode and drop what was recorded. Does nothing when not capturing."""
        if self._recorder is not None:
            with suppress(NotWarmedUpError):  # what was recorded is dropped anyway
                self._leave_capture("abort_capture()")
            self._clear()

    def _leave_capture(self, caller: str) -> HostRecorder:
        from graphcap_backend.capture.host_recorder import HostRecorder

        recorder = self._recorder
        if recorder is None:
            raise CaptureError(f"{caller}: no capture is on; call capture_begin() before")
        if HostRecorder.on_this_thread() is not recorder:
            raise CaptureError(f"{caller} was called on another thread than capture_begin(); call it there")
        self._recorder = None
        try:
            recorder.stop()
        finally:
            self._patches.close()
        return recorder

    def instantiate(self) -> None:
        """Make the instance that replays, with a new ``exec_id``.

        Raises:
            GraphcapError: nothing is captured, or ``keep_graph`` is False and there is one.
        """
        self._captured("instantiate()")
        if not self._keep_graph:
            raise GraphcapError("instantiate() is for graphs made with keep_graph=True")
        self.exec_id = next(self._ids)

    def replay(self) -> None:
        """Run every recorded launch once, into the same buffers.

        Raises:
            GraphcapError: nothing is captured.
            CaptureError: called inside a host capture of this thread.
        """
        from graphcap_backend.capture.host_memory import plain_kernels
        from graphcap_backend.capture.host_recorder import HostRecorder

        if HostRecorder.on_this_thread() is not None:
            raise CaptureError("replay() cannot be captured into another HostGraph")
        with self._lock:
            launches = self._captured("replay()")
            if self.exec_id is None:
                self.instantiate()
            timer = self.launch_timer
            with plain_kernels():
                if timer is None:
                    for launch in launches:
                        launch()
                else:
                    for index, launch in enumerate(launches):
                        start = time.perf_counter_ns()
                        launch()
                        timer(index, time.perf_counter_ns() - start)

    def reset(self) -> None:
        """Drop the captured graph and its buffers; a capture may begin again.

        Raises:
            CaptureError: this graph is capturing.
        """
        if self._recorder is not None:
            raise CaptureError("reset() inside the capture; end it first")
        with self._lock:
            self._clear()

    def pool(self) -> PoolToken:
        """Token of this graph's memory pool.

        Raises:
            GraphcapError: nothing is captured.
        """
        self._captured("pool()")
        assert self._pool is not None
        return self._pool

    def _captured(self, caller: str) -> Sequence[Launch]:
        if self._launches is None:
            raise GraphcapError(f"{caller} needs a captured graph; capture one first")
        return self._launches


def _check_pool(pool: object) -> None:
    is_token = isinstance(pool, tuple) and len(pool) == 2 and all(isinstance(part, int) for part in pool)
    if pool is not None and not is_token:
        raise TypeError(
            f"pool is {type(pool).__name__}; expected a token of graph_pool_handle() or of another graph's pool()"
        )
