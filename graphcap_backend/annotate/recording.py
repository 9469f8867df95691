"""One capture's recording: scope and stack of each node, from before its begin to its end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Literal

import torch

from graphcap_backend.annotate import backward
from graphcap_backend.annotate.origins import known_wrappers
from graphcap_backend.annotate.process import PROCESS
from graphcap_backend.annotate.registry import Entry, GraphKeys, GraphRecord
from graphcap_backend.annotate.scopes import Scope, current_scope
from graphcap_backend.annotate.stacks import absolute_filter_paths, provenance_now
from graphcap_backend.errors import CuptiError, CuptiMissingError

if TYPE_CHECKING:
    from graphcap_backend.annotate.backward import Launch
    from graphcap_backend.annotate.config import AnnotationConfig
    from graphcap_backend.annotate.edge_walk import EdgeWalk

Way = Literal["cupti", "edge_walk", "host"]

# Bound here, since they are called once per node.
_gather_traceback = torch._C._profiler.gather_traceback
_node_now = torch._C._current_autograd_node

_NUM_CHECKED: Final = 16
"""Nodes whose CUPTI id is compared with their position, per capture."""


Event = tuple[int, "Scope | None", Any, "Launch | None"]
"""What is noted when a node is created: its position in creation order (while CUPTI records, the
``cudaGraphNode_t``), scope, raw traceback, and what autograd says. A plain tuple, since it is made once per node."""


class Recording:
    """What one capture records.

    ::

        start_host, start_cuda -> bind (CUDA) -> on_node ... -> stop -> seal | discard

    ``stop`` belongs on the thread that started, and before the capture ends. After a failure
    only ``discard`` may be called: it leaves nothing behind, and looks at no graph. Both may be
    called again.

    Attributes:
        way: how nodes are found: "cupti", "edge_walk" or "host".
        gathers: whether raw tracebacks are taken.
        by_source: whether keys are those of the captured graph, not of the executable one.
        walk: the edge walk, which scopes report to; None on the other ways.
    """

    def __init__(self, config: AnnotationConfig, way: Way) -> None:
        self.way: Final = way
        self.walk: EdgeWalk | None = None
        self.by_source: Final = config.key_by == "source" or (
            config.key_by == "auto" and way != "host" and source_ids_available()
        )
        self._config: Final = config
        self._filter_paths = absolute_filter_paths(config.py_stack_filter_paths)
        # Scopes traced into a compiled region are found by the wrapper's line, so by stack.
        self.gathers = config.record_py_stacks or any(wrapper.annotated for wrapper in known_wrappers().values())
        self._events: list[Event] = []
        self._positions: Sequence[int] | None = None
        """Of the events, where they do not say it themselves."""
        self._graph = 0
        self._recording = False
        self._outer: Recording | None = None
        self._num_failures = 0
        self._first_failure: BaseException | None = None

    @classmethod
    def start_host(cls, config: AnnotationConfig) -> Recording:
        """Record a capture into a HostGraph; the host recorder calls ``on_node``."""
        recording = cls(config, "host")
        recording._begin()
        return recording

    @classmethod
    def start_cuda(cls, config: AnnotationConfig, device_index: int) -> Recording:
        """Record a capture into a CUDA graph. Subscribes to CUPTI where that is the way.

        Raises:
            CuptiBusyError, CuptiMissingError, CuptiError: the config insists on CUPTI and it
                cannot be had, or on ``key_by="source"`` below CUPTI and driver 13.4.
        """
        if config.key_by == "source":
            _require_source_ids()
        if _choose_way(config) == "edge_walk":
            from graphcap_backend.annotate.edge_walk import num_nodes

            return cls.start_walk(config, num_nodes)
        try:
            recording = cls(config, "cupti")
            recording._begin()
        except BaseException:
            _release_callbacks()
            raise
        return recording

    @classmethod
    def start_walk(cls, config: AnnotationConfig, count_nodes: Callable[[int], int]) -> Recording:
        """Record by edge walk.

        Args:
            count_nodes: gives the number of nodes of the graph that ``bind`` will name.
        """
        from graphcap_backend.annotate.edge_walk import EdgeWalk

        recording = cls(config, "edge_walk")
        recording.walk = EdgeWalk(count=count_nodes, watches_lines=recording.gathers)
        recording._begin()
        return recording

    def _begin(self) -> None:
        self._outer = backward.attach(self)
        self._recording = True
        with PROCESS.lock:
            PROCESS.num_recording += 1

    def bind(self, cuda_graph: int) -> None:
        """Say which ``cudaGraph_t`` is under construction, right after capture began."""
        if not self._recording:
            return
        self._graph = cuda_graph
        if self.walk is not None:
            self.walk.begin(cuda_graph, current_scope())
        else:
            PROCESS.by_graph[cuda_graph] = self

    def on_node(self, graph: int, node: int) -> None:
        """A node was created just now, on this thread.

        Args:
            graph: its ``cudaGraph_t``; 0 for a HostGraph.
            node: its ``cudaGraphNode_t``; its index for a HostGraph.
        """
        if not self._recording:
            return
        traceback = None
        if self.gathers:
            traceback = _gather_traceback(True, False, False)
        running = _node_now()
        launch = None if running is None else backward.launch_of(running)
        self._events.append((node, current_scope(), traceback, launch))

    def note_failure(self, error: BaseException) -> None:
        """Noting a node failed; said once, when the recording stops."""
        self._num_failures += 1
        self._first_failure = self._first_failure or error

    def stop(self) -> None:
        """End the recording and give CUPTI back. The stream is still capturing."""
        self._finish(reads_graph=True)
        if self._num_failures:
            error = self._first_failure
            PROCESS.warn_once(
                f"callback {type(error).__name__}",
                f"{self._num_failures} captured nodes have no annotation or stack, because "
                f"noting them failed; first with {error!r}",
            )

    def _finish(self, *, reads_graph: bool) -> None:
        if not self._recording:
            return
        self._recording = False
        with PROCESS.lock:
            PROCESS.num_recording -= 1
            PROCESS.by_graph.pop(self._graph, None)
        walk, self.walk = self.walk, None
        try:
            backward.detach(self, self._outer)
            self._outer = None
            if walk is not None:
                self._events = walk.end(reads_graph=reads_graph)
            elif self.way == "cupti" and reads_graph:
                self._positions = _positions([event[0] for event in self._events])
        finally:
            if self.way == "cupti":
                _release_callbacks()

    def seal(self, keys: GraphKeys) -> GraphRecord:
        """Turn what was recorded into the graph's record, after the capture succeeded.

        The caller holds the record as long as the graph; the process knows it weakly.
        """
        self.stop()
        record = GraphRecord(
            way=self.way,
            config=self._config,
            filter_paths=self._filter_paths,
            by_source=self.by_source,
            keys=keys,
            entries=self._take_entries(),
            provenance=provenance_now() if self.gathers else None,
        )
        with PROCESS.lock:
            PROCESS.records.add(record)
        return record

    def _take_entries(self) -> Callable[[], list[Entry]]:
        """What makes the entries of what was recorded. Not now: the end of a capture should cost little, too."""
        events, self._events = self._events, []
        return partial(_entries, events, self._positions or [event[0] for event in events])

    def discard(self) -> None:
        """The capture failed: forget everything. The graph may be gone and is not looked at."""
        try:
            self._finish(reads_graph=False)
        finally:
            self._events, self._positions = [], None


def _choose_way(config: AnnotationConfig) -> Way:
    """Subscribe to CUPTI, or say why edges are walked. Raises where CUPTI is insisted on."""
    if config.backend == "edge_walk":
        return "edge_walk"
    from graphcap_backend.annotate import cupti

    try:
        cupti.acquire_callbacks()
    except CuptiError as error:
        if config.backend == "cupti" or (config.record_py_stacks and not config.best_effort):
            raise
        lost = (
            "stacks are those of compiled kernels only"
            if config.record_py_stacks
            else "nodes are found by walking the capture graph instead"
        )
        PROCESS.warn_once("no cupti", f"CUPTI node callbacks are not to be had, {lost}: {error}")
        return "edge_walk"
    return "cupti"


def _release_callbacks() -> None:
    from graphcap_backend.annotate import cupti

    try:
        cupti.release_callbacks()
    except CuptiError as error:
        # The capture is good all the same; what may be left behind is slower replays.
        PROCESS.warn_once("cupti release", f"giving CUPTI back failed: {error}")


def _positions(nodes: list[int]) -> Sequence[int]:
    """Positions of ``cudaGraphNode_t`` as they came. CUPTI reports nodes in the order of their ids.

    A few ids are compared all the same, and every one is asked for if one differs.
    """
    from graphcap_backend.annotate import cupti

    step = max(1, len(nodes) // _NUM_CHECKED)
    sample = {*range(0, len(nodes), step), *range(len(nodes))[-1:]}
    low = 0xFFFF_FFFF
    try:
        in_order = all(cupti.node_id(nodes[at]) & low == at for at in sample)
    except CuptiError:
        in_order = True  # as on every driver seen
    if in_order:
        return range(len(nodes))
    return [cupti.node_id(node) & low for node in nodes]


def source_ids_available() -> bool:
    """Whether replayed work is reported with the id of the node it was captured as."""
    try:
        _require_source_ids()
    except CuptiError:
        return False
    return True


def _require_source_ids() -> None:
    from graphcap_backend.annotate import cupti, edge_walk

    found = cupti.version()
    driver = edge_walk.driver_version()
    if found < 130400 or driver < 13040:
        raise CuptiMissingError(
            'annotation_config["key_by"]="source"',
            f"found CUPTI {found // 10000}.{found % 10000 // 100} and a driver for CUDA "
            f"{driver // 1000}.{driver % 1000 // 10}; needed 13.4 of both",
            'Use key_by="exec", or "auto", which is "exec" here',
        )


def _entries(events: Sequence[Event], positions: Sequence[int]) -> list[Entry]:
    return [_entry(position, event) for position, event in zip(positions, events, strict=True)]


def _entry(position: int, event: Event) -> Entry:
    _, scope, traceback, launch = event
    annotation = None if scope is None else scope.annotation
    if launch is None:
        return Entry(position, annotation, traceback, None, False)
    forward = None
    if launch.origin is not None:
        forward = launch.origin.traceback
        if launch.origin.annotation is not None:
            annotation = backward.inherited(scope, launch.origin.annotation, launch.number)
            annotation["autograd_phase"] = "backward"
    return Entry(position, annotation, traceback, forward, True)
