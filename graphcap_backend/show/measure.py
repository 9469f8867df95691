"""Measure what replays cost, node by node."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from graphcap_backend.annotate.profile import Activity, join
from graphcap_backend.annotate.shape import exec_ids
from graphcap_backend.capture.host import HostGraph
from graphcap_backend.capture.nodes import Node, NodeList
from graphcap_backend.capture.record import capture_nodes, captured_graph
from graphcap_backend.errors import GraphcapError
from graphcap_backend.report import Report, report
from graphcap_backend.show.profile import NodeTime, OutsideTime, Profile
from graphcap_backend.show.saved import SavedCapture, report_of, snapshot

if TYPE_CHECKING:
    from graphcap_backend.annotate.activities import ActivityRecords

_WARM_UP_CALLS = 3
_ATTEMPTS = 3
_CALL = "profile_replays(compiled_or_graph, ...)"


def profile_replays(
    compiled_or_graph: Any,
    *args: Any,
    num_replays: int = 20,
    run: Callable[[], object] | None = None,
    **kwargs: Any,
) -> Profile:
    """Measure where the time of replays goes, by node and by the source lines behind it.

    Calls are real ones, with all their side effects: three to warm up (they capture what is not yet), then
    ``num_replays``, more if those still captured something. On a GPU, activity records of CUPTI are read; for a
    ``HostGraph`` each launch is timed on the CPU.

    With activity records on, CUPTI stays in the process: replays cost more host time from then on (their GPU
    time is the same), and torch.profiler still works.

    Args:
        compiled_or_graph: a function compiled with the graphcap backend, or a graph captured by ``graph``.
        args, kwargs: for the compiled function.
        num_replays: how many calls or replays to measure.
        run: what one call is, if it is not ``compiled(*args, **kwargs)``: a training step, say.

    Raises:
        ValueError, TypeError: an argument is not what it must be.
        GraphcapError: nothing is captured, the calls replay none of it, or every call captures something new.
        CuptiBusyError: somebody else holds CUPTI: torch.profiler after its first profile, Nsight.
        CuptiMissingError: libcupti or cupti-python is not there.
        CuptiError: CUPTI dropped records, so that times would be wrong; or another call into it failed.
    """
    if not isinstance(num_replays, int) or isinstance(num_replays, bool) or num_replays < 1:
        raise ValueError(f"num_replays must be an int of at least 1, found {num_replays!r}")
    _check(compiled_or_graph)
    step = _step(compiled_or_graph, args, kwargs, run)
    for _ in range(_WARM_UP_CALLS):
        step()
    for _ in range(_ATTEMPTS):
        graphs = _graphs(compiled_or_graph)
        capture = snapshot(compiled_or_graph, _CALL)  # reads ids and nodes: before activity records are on
        measured = _Measured(graphs, capture)
        with measured.recorded():
            for _ in range(num_replays):
                step()
        if [id(graph) for graph in _graphs(compiled_or_graph)] == [id(graph) for graph in graphs]:
            return _told(measured.profile(num_replays))
    raise GraphcapError(
        f"each of {_ATTEMPTS} x {num_replays} calls captured something new, so there is no steady state to measure. "
        "report(compiled) says what; pass inputs of one shape"
    )


def _check(target: Any) -> None:
    """Raise for what has no replays, before anything is called."""
    if isinstance(target, Report):
        raise ValueError(
            "a Report cannot be called: give profile_replays() the compiled function, or one of its graphs"
        )
    if captured_graph(target) is not None:
        return
    if hasattr(target, "capture_begin"):
        capture_nodes(target)  # raises, saying what such a graph is expected to be
    report_of(target, _CALL)


def _step(target: Any, args: Any, kwargs: Any, run: Callable[[], object] | None) -> Callable[[], object]:
    if run is not None:
        if args or kwargs:
            raise TypeError("give either run or arguments for the compiled function, not both")
        return run
    if captured_graph(target) is not None:
        if args or kwargs:
            raise TypeError("a graph replays without arguments; they are for a compiled function")
        replay: Callable[[], object] = target.replay
        return replay
    return lambda: target(*args, **kwargs)


def _graphs(target: Any) -> list[Any]:
    graphs = [target] if captured_graph(target) is not None else list(report(target).graphs)
    if not graphs:
        raise GraphcapError(
            f"expected captured graphs to measure, found none after {_WARM_UP_CALLS} calls; the report says why:\n"
            f"{report(target)}"
        )
    return graphs


def _told(profile: Profile) -> Profile:
    if profile.capture.num_nodes and not profile.times and not profile.outside:
        raise GraphcapError(
            f"{profile.num_calls} calls replayed none of the {len(profile.capture.graphs)} captured graphs: "
            "nothing to show. run() must call the compiled function, with inputs that are captured; report(compiled) "
            "lists calls that ran uncaptured"
        )
    return profile


class _Measured:
    """One measurement: what is recorded, and the nodes to join it with."""

    def __init__(self, graphs: list[Any], capture: SavedCapture) -> None:
        self._host = [(at, graph) for at, graph in enumerate(graphs) if isinstance(graph, HostGraph)]
        self._on_cuda = len(self._host) < len(graphs)
        self._capture = capture
        self._found: list[Activity] = []
        self._keys: dict[int, tuple[int, tuple[int, ...]]] = {}
        for at, (graph, saved) in enumerate(zip(graphs, capture.graphs, strict=True)):
            if isinstance(graph, HostGraph):  # which runs a launch for every node, and numbers them as they are
                high = graph.graph_id << 32
                self._keys.update((high | node.index, (at, (node.index,))) for node in saved.nodes)
            elif saved.exec_graph_id is not None:
                high = saved.exec_graph_id << 32
                self._keys.update((high | node_id, (at, path)) for node_id, path in exec_ids(saved.nodes))

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Record what the block runs; it is synchronized before and behind."""
        with ExitStack() as stack:
            for _, graph in self._host:
                graph.launch_timer = self._timer(graph)
                stack.callback(setattr, graph, "launch_timer", None)
            records: ActivityRecords | None = None
            if self._on_cuda:
                import torch

                from graphcap_backend.annotate.activities import ActivityRecords

                torch.cuda.synchronize()
                records = stack.enter_context(ActivityRecords())
                stack.callback(torch.cuda.synchronize)
            yield
        if records is not None:
            self._found += records.found

    def _timer(self, graph: HostGraph) -> Callable[[int, int], None]:
        names = [node.name for node in graph.nodes]
        high, add = graph.graph_id << 32, self._found.append
        return lambda index, duration: add(Activity(names[index], high | index, duration))

    def profile(self, num_calls: int) -> Profile:
        nodes, outside = join(self._found, self._keys)
        return Profile(
            capture=self._capture,
            clock="cuda" if self._on_cuda else "cpu",
            num_calls=num_calls,
            times=tuple(
                NodeTime(
                    graph=graph,
                    path=path,
                    node=_node_at(self._capture.graphs[graph].nodes, path),
                    labels=self._capture.graphs[graph].nodes[path[0]],
                    timing=timing,
                )
                for (graph, path), timing in sorted(nodes.items())
            ),
            outside=tuple(
                OutsideTime(name=name, timing=timing)
                for name, timing in sorted(outside.items(), key=lambda item: -item[1].total_ns)
            ),
        )


def _node_at(nodes: NodeList, path: tuple[int, ...]) -> Node:
    node = nodes[path[0]]
    for index in path[1:]:
        assert node.body is not None
        node = node.body[index]
    return node
