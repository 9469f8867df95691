"""Scopes from the capture frontier, for captures that can't have CUPTI callbacks.

Nodes are numbered in creation order, so the frontier that matters is how many there are in
the graph under construction. It is read where the scope in force changes: nodes between two
readings belong to the scope between them. That is one reading per change, whatever the
nesting depth, and nothing per node. What is not seen: which of several threads that launch
into one capture at the same time made a node.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from graphcap_backend.annotate import backward
from graphcap_backend.errors import CudaError

if TYPE_CHECKING:
    from graphcap_backend.annotate.recording import Event
    from graphcap_backend.annotate.scopes import Scope


class Mark(NamedTuple):
    """From node ``first`` on, these are in force."""

    first: int
    scope: Scope | None
    traceback: Any = None
    launch: backward.Launch | None = None


class EdgeWalk:
    """The walk of one capture: marks in the order of creation."""

    def __init__(self, *, watches_lines: bool = False) -> None:
        self._graph = 0
        self._marks: list[Mark] = []
        self._watches_lines: Final = watches_lines

    def begin(self, cuda_graph: int, scope: Scope | None) -> None:
        """The capture into ``cuda_graph`` began."""
        self._graph = cuda_graph
        self.mark(scope)

    def mark(self, scope: Scope | None) -> None:
        """``scope`` is in force from now on."""
        if self._graph:
            self._marks.append(Mark(num_nodes(self._graph), scope))

    def end(self) -> list[Event]:
        """What is in force where each node was created, in order."""
        from graphcap_backend.annotate.recording import Event

        if not self._graph:
            return []
        last = num_nodes(self._graph)
        self._graph = 0
        ends = [mark.first for mark in self._marks[1:]] + [last]
        return [
            Event(node, mark.scope, mark.traceback, mark.launch)
            for mark, end in zip(self._marks, ends, strict=True)
            for node in range(mark.first, end)
        ]


def num_nodes(cuda_graph: int) -> int:
    """How many nodes a ``cudaGraph_t`` has, also while it is under construction.

    Raises:
        CudaError: naming the call.
    """
    from cuda.bindings import runtime

    result, _, number = runtime.cudaGraphGetNodes(cuda_graph)
    if result != runtime.cudaError_t.cudaSuccess:
        raise CudaError("cudaGraphGetNodes", result.name)
    return int(number)


def is_usable() -> bool:
    """Whether cuda-bindings is there to read the frontier with."""
    if torch.version.cuda is None:
        return False
    try:
        from cuda.bindings import runtime
    except ImportError:
        return False
    return hasattr(runtime, "cudaGraphGetNodes")
