"""Where the nodes of a captured ``torch.cuda.CUDAGraph`` are read from, late."""

from __future__ import annotations

import weakref
from typing import Any

from graphcap_backend.capture.nodes import NodeList
from graphcap_backend.errors import GraphcapError


class KeptTemplate:
    """keep_graph=True: torch holds the template; the caller may change it, so it is read each time."""

    def __init__(self, graph: Any) -> None:
        self._graph = weakref.ref(graph)

    def __call__(self) -> NodeList:
        from graphcap_backend.capture.cuda_nodes import read_cuda_nodes

        graph = self._graph()
        if graph is None:
            raise GraphcapError("the graph was deleted")
        return read_cuda_nodes(graph.raw_cuda_graph())


class ClonedTemplate:
    """keep_graph=False: torch destroys the template when capture ends, so a clone is taken before.

    The clone dies when it has been read or when its owner, the capture's record, does.
    """

    def __init__(self, cuda_graph: int) -> None:
        self._nodes: NodeList | None = None
        self._problem: Exception | None = None
        try:
            from graphcap_backend.capture.cuda_nodes import clone_cuda_graph, destroy_cuda_graph

            self._clone = clone_cuda_graph(cuda_graph)
        except (GraphcapError, ImportError) as error:
            # The capture itself needs no node list; whoever asks for one is told.
            self._problem = error
        else:
            self._destroy = weakref.finalize(self, destroy_cuda_graph, self._clone)
            self._destroy.atexit = False  # the driver may be gone by then

    def __call__(self) -> NodeList:
        if self._problem is not None:
            raise GraphcapError(
                f"the nodes of this graph are not available: {self._problem}. They are read through the package "
                "cuda-bindings; install it with `pip install cuda-bindings` and capture again"
            ) from self._problem
        if self._nodes is None:
            from graphcap_backend.capture.cuda_nodes import read_cuda_nodes

            self._nodes = read_cuda_nodes(self._clone)
            self._destroy()
        return self._nodes

    def drop(self) -> None:
        """Destroy the clone now: the capture failed."""
        if self._problem is None:
            self._destroy()


def no_nodes() -> NodeList:
    """Nodes of a capture that recorded nothing."""
    return NodeList(())
