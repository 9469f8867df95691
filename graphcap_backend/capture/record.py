"""What a capture leaves behind, and how it dies.

A :class:`CapturedGraph` is kept per graph object for as long as that object lives and holds this very
capture: ``reset()`` and a new capture end it. Whoever asks afterwards gets an error, never a node
list of another graph.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from graphcap_backend.capture import driver
from graphcap_backend.capture.bodies import labelled
from graphcap_backend.capture.call_watch import CallWatch
from graphcap_backend.capture.nodes import Node, NodeList
from graphcap_backend.capture.process import PROCESS
from graphcap_backend.errors import CuptiError, CuptiMissingError, GraphcapError

if TYPE_CHECKING:
    from graphcap_backend.annotate.registry import GraphRecord

_LOW_32_BITS = 0xFFFF_FFFF


class CudaKeys:
    """Identity of a capture in a ``torch.cuda.CUDAGraph``.

    CUPTI is not asked: on first use it makes every later replay in the process slower, also for users
    who record nothing. The graph id is the driver's capture id (the same number), and whether the
    object still holds this capture shows in its raw handle and pool, and in that nobody called ``reset()``:
    a later capture may get both anew.
    """

    def __init__(self, graph: Any, *, source_graph_id: int, keep_graph: bool) -> None:
        self.source_graph_id = source_graph_id
        self._graph = weakref.ref(graph)
        self._keep_graph = keep_graph
        self._resets = CallWatch.on(graph, "reset")
        self._superseded = False
        self._identity = self._read_identity()
        self._known: _KnownExec | None = None

    def _read_identity(self) -> tuple[int, tuple[int, ...], int] | None:
        graph = self._graph()
        if graph is None:
            return None
        try:
            handle = graph.raw_cuda_graph() if self._keep_graph else graph.raw_cuda_graph_exec()
            return handle, tuple(graph.pool()), self._resets.count
        except RuntimeError:  # torch's answer when there is no such graph (any more)
            return None

    def supersede(self) -> None:
        """The object was captured anew: this capture is over."""
        self._superseded = True

    def alive(self) -> bool:
        """Whether the graph object still holds this capture."""
        return not self._superseded and self._identity is not None and self._read_identity() == self._identity

    def exec_graph_id(self) -> int | None:
        """Id that replayed work carries now; None before the first ``instantiate()``."""
        graph = self._graph()
        if graph is None or not self.alive():
            return None
        known = self._known
        # Read before the handle that it vouches for.
        calls = 0 if known is None or known.watch is None else known.watch.count
        try:
            handle: int = graph.raw_cuda_graph_exec()
        except RuntimeError:
            return None
        if known is not None and (known.handle, known.calls) == (handle, calls):
            return known.exec_id
        exec_id = driver.graph_exec_id(handle)
        return self._ask_cupti(graph) if exec_id is None else exec_id

    def _ask_cupti(self, graph: Any) -> int | None:
        """The id where the driver (before 13.1) cannot tell it; asked once per executable graph."""
        from graphcap_backend.annotate import cupti

        # Without keep_graph torch instantiates once, when the capture ends.
        watch = CallWatch.on(graph, "instantiate") if self._keep_graph else None
        calls = 0 if watch is None else watch.count
        try:
            handle: int = graph.raw_cuda_graph_exec()
        except RuntimeError:  # reset by another thread just now
            return None
        try:
            exec_id = cupti.graph_exec_id(handle)
        except CuptiMissingError:
            exec_id = _stand_in(handle)
        except CuptiError:
            return _stand_in(handle)  # the next time may go better
        self._known = _KnownExec(handle, watch, calls, exec_id)
        return exec_id


class _KnownExec(NamedTuple):
    """An executable graph whose id is known, for as long as its handle and the watch's count are what they were."""

    handle: int
    watch: CallWatch | None
    calls: int
    exec_id: int


def _stand_in(handle: int) -> int:
    # No CUPTI, no trace to join with: any number that tells live graphs apart will do.
    return handle >> 4 & _LOW_32_BITS


class HostKeys:
    """Identity of a capture in a ``HostGraph``, which counts its captures itself."""

    def __init__(self, graph: Any) -> None:
        self.source_graph_id: int = graph.graph_id
        self._graph = weakref.ref(graph)

    def supersede(self) -> None:
        """Nothing to do: a new capture has a new ``graph_id``."""

    def alive(self) -> bool:
        """Whether the graph object still holds this capture."""
        graph = self._graph()
        return graph is not None and graph.graph_id == self.source_graph_id

    def exec_graph_id(self) -> int | None:
        """Id of the executable graph now; None before the first ``instantiate()``."""
        graph = self._graph()
        exec_id: int | None = graph.exec_id if graph is not None and self.alive() else None
        return exec_id


class CapturedGraph:
    """One capture: its nodes, and what was recorded about them.

    Attributes:
        record: annotations and stacks by node; None when the capture recorded none.
        num_nodes: nodes at the top level when the capture ended.
    """

    def __init__(
        self,
        graph: Any,
        *,
        keys: CudaKeys | HostKeys,
        read_nodes: Callable[[], NodeList],
        num_nodes: int,
        record: GraphRecord | None,
        keep: object = None,
    ) -> None:
        self.record = record
        self.num_nodes = num_nodes
        self.keys = keys
        self._read_nodes = read_nodes
        if record is not None:
            record.read_shape_with(read_nodes)
        self._keep = keep  # a MemPool given by the caller must outlive the graph that uses it
        with PROCESS.lock:
            previous = PROCESS.captured.get(graph)
            if previous is not None:
                previous.keys.supersede()
            PROCESS.captured[graph] = self

    @property
    def way(self) -> str | None:
        """How nodes were matched to scopes: "cupti", "edge_walk", "host"; None without recording."""
        return None if self.record is None else self.record.way

    def nodes(self) -> NodeList:
        """All nodes in creation order, with annotations and stacks; nodes inside a child graph or a
        conditional have those of the node that they lie in.

        Raises:
            GraphcapError: the graph was reset, captured anew or deleted, or its nodes cannot be read.
        """
        if not self.keys.alive():
            raise GraphcapError(
                "this capture is gone: its graph was reset, captured anew or deleted. Call capture_nodes(g) "
                "while g holds the capture; the list it gives stays valid afterwards"
            )
        nodes = self._read_nodes()
        record = self.record
        if record is None:
            return nodes
        return NodeList([_labelled(node, record) for node in nodes])


def _labelled(node: Node, record: GraphRecord) -> Node:
    labels: dict[str, Any] = {
        "annotation": record.annotation(node.index),
        "stack": record.stack(node.index),
        "sources": record.sources(node.index),
        "modules": record.modules(node.index),
    }
    outer = dataclasses.replace(node, **labels)
    return outer if node.body is None else dataclasses.replace(outer, body=labelled(node.body, outer))


def captured_graph(graph: Any) -> CapturedGraph | None:
    """The record of the capture that ``graph`` holds; None if graphcap took none or it is over."""
    try:
        captured = PROCESS.captured.get(graph)
    except TypeError:  # not weakly referable, so no graph
        return None
    if captured is None or captured.keys.alive():
        return captured
    with PROCESS.lock:
        PROCESS.captured.pop(graph, None)
    return None


def capture_nodes(g: Any) -> NodeList:
    """Nodes of a captured graph, in creation order.

    Args:
        g: a ``torch.cuda.CUDAGraph`` or :class:`HostGraph` captured by :class:`graph` or by the backend.

    Raises:
        GraphcapError: ``g`` holds no capture that graphcap took, or cuda-bindings is missing.
    """
    captured = captured_graph(g)
    if captured is None and not hasattr(g, "capture_begin"):
        raise GraphcapError(
            f"capture_nodes() takes one captured graph, found {type(g).__name__}; those of a compiled function are "
            "report(compiled).graphs"
        )
    if captured is None:
        raise GraphcapError(
            f"capture_nodes() needs a graph captured by graphcap_backend.graph or by the graphcap backend; this "
            f"{type(g).__name__} was not, or it was reset since. Capture with `with graphcap_backend.graph(g): ...`"
        )
    return captured.nodes()
