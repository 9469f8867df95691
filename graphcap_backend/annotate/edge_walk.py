"""Scopes from the capture frontier, for captures that can't have CUPTI callbacks.

Nodes are numbered in creation order, so the frontier that matters is how many there are in
the graph under construction. It is read where what is in force changes: nodes between two
readings belong to what was in force between them. That is one reading per change, whatever
the nesting depth, and nothing per node. What is not seen: which of several threads that
launch into one capture at the same time made a node.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from graphcap_backend.annotate import backward
from graphcap_backend.annotate.backward_brackets import watch_backwards
from graphcap_backend.annotate.line_watch import LineWatch
from graphcap_backend.annotate.scopes import current_scope
from graphcap_backend.errors import CudaError

if TYPE_CHECKING:
    from graphcap_backend.annotate.recording import Event
    from graphcap_backend.annotate.scopes import Scope


class Mark(NamedTuple):
    """From node ``first`` on, these are in force."""

    first: int
    scope: Scope | None
    launch: backward.Launch | None
    traceback: Any


class EdgeWalk:
    """The walk of one capture: marks in the order of creation.

    Args:
        count: gives the number of nodes of a graph under construction.
        watches_lines: also find the wrapper lines that launch compiled kernels.
    """

    def __init__(self, *, count: Callable[[int], int], watches_lines: bool = False) -> None:
        self._count: Final = count
        self._graph = 0
        self._marks: list[Mark] = []
        self._lines: Final = LineWatch(self.mark_line) if watches_lines else None

    def begin(self, cuda_graph: int, scope: Scope | None) -> None:
        """The capture into ``cuda_graph`` began, on this thread."""
        self._graph = cuda_graph
        self.mark(scope)
        watch_backwards(1)
        if self._lines is not None:
            self._lines.start()

    def mark(self, scope: Scope | None) -> None:
        """``scope`` is in force from now on, in work of the autograd node that runs, if any."""
        self._put(scope, backward.running(), None)

    def mark_node(self, scope: Scope | None, launch: backward.Launch | None) -> None:
        """The autograd node of ``launch`` runs from now on; with None, one that has no forward scope.

        For hooks before a node, where the engine may or may not call it running.
        """
        self._put(scope, launch, None)

    def mark_line(self, traceback: Any) -> None:
        """The line that ``traceback`` begins with runs from now on; with None, none does."""
        self._put(current_scope(), backward.running(), traceback)

    def _put(self, scope: Scope | None, launch: backward.Launch | None, traceback: Any) -> None:
        if not self._graph:
            return
        mark = Mark(self._count(self._graph), scope, launch, traceback)
        if self._marks and self._marks[-1].first == mark.first:
            self._marks[-1] = mark  # nothing was launched in between
        else:
            self._marks.append(mark)

    def end(self, *, reads_graph: bool = True) -> list[Event]:
        """What is in force where each node was created, in order. On the thread of ``begin``.

        Args:
            reads_graph: False when the capture failed: the graph may be gone.
        """
        if not self._graph:
            return []
        graph, self._graph = self._graph, 0
        watch_backwards(-1)
        if self._lines is not None:
            self._lines.stop()
        if not reads_graph:
            return []
        ends = [mark.first for mark in self._marks[1:]] + [self._count(graph)]
        return [
            (node, mark.scope, mark.traceback, mark.launch)
            for mark, end in zip(self._marks, ends, strict=True)
            for node in range(mark.first, end)
        ]


@cache
def _libcuda() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def num_nodes(cuda_graph: int) -> int:
    """How many nodes a ``cudaGraph_t`` has, also while it is under construction.

    Raises:
        CudaError: naming the call.
    """
    count = ctypes.c_size_t()
    result = _libcuda().cuGraphGetNodes(ctypes.c_void_p(cuda_graph), None, ctypes.byref(count))
    if result != 0:
        raise CudaError("cuGraphGetNodes", f"CUresult {result}")
    return count.value


def driver_version() -> int:
    """The CUDA version that the driver is for, 13040 for 13.4. Raises: as ``num_nodes``."""
    version = ctypes.c_int()
    result = _libcuda().cuDriverGetVersion(ctypes.byref(version))
    if result != 0:
        raise CudaError("cuDriverGetVersion", f"CUresult {result}")
    return version.value


def is_usable() -> bool:
    """Whether the frontier can be read: torch is built for CUDA."""
    return torch.version.cuda is not None
