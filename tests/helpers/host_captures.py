"""Take a capture into a HostGraph without the session round it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from graphcap_backend.capture.host import HostGraph

T = TypeVar("T")


@contextmanager
def capturing(graph: HostGraph) -> Iterator[HostGraph]:
    graph.capture_begin()
    try:
        yield graph
    except BaseException:
        graph.abort_capture()
        raise
    graph.capture_end()


def captured(function: Callable[[], T], *, keep_graph: bool = False) -> tuple[HostGraph, T]:
    graph = HostGraph(keep_graph=keep_graph)
    with capturing(graph):
        result = function()
    return graph, result


def names(graph: HostGraph) -> list[str]:
    return [node.name for node in graph.nodes]
