"""What recording scopes and stacks costs per node, over a capture that records nothing."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.measure import alternate
from benchmarks.peer_handler import HINT, PeerSubscription, find_peer
from benchmarks.rows import Row, Target, ratio_row, value_row
from benchmarks.settings import Settings
from graphcap_backend import capture_nodes, graph, mark_kernels

NUM_NODES = 2500
DEPTH = 60
SCOPE_DEPTHS = (1, 16)
WITH_STACKS: dict[str, Any] = {"record_py_stacks": True}
BY_EDGES: dict[str, Any] = {"backend": "edge_walk"}
_TARGET = Target(bar=6.0, aim=4.0)
_PEER_TARGET = Target(bar=0.5)
PEER = "torch 2.15"


def deep(depth: int, work: Callable[[], float]) -> float:
    """Run ``work`` below so many more Python frames."""
    return work() if depth == 0 else deep(depth - 1, work)


class Captures:
    """Captures of the same ``num_nodes`` launches. Each method takes one and returns seconds."""

    def __init__(self, settings: Settings, num_nodes: int) -> None:
        self._settings = settings
        self._num_nodes = num_nodes
        self._x: Tensor = torch.randn(64, device=settings.device)
        self._x.add_(1)  # loads the kernel
        self.last_graph: Any = None

    def plain(self) -> float:
        """Launching, nothing recorded, captured by torch itself where there is CUDA."""
        graph_ = self.last_graph = self._settings.new_graph()
        self._settings.synchronize()
        with torch.cuda.graph(graph_) if self._settings.on_cuda else graph(graph_):
            return deep(DEPTH, self._launch)

    def recorded(self) -> float:
        """Launching, scopes and stacks recorded by us."""
        graph_ = self.last_graph = self._settings.new_graph()
        self._settings.synchronize()
        with graph(graph_, enable_annotations=True, annotation_config=WITH_STACKS), mark_kernels("work"):
            return deep(DEPTH, self._launch)

    def by_peer(self, peer: PeerSubscription) -> float:
        """Launching, scopes and stacks recorded by torch 2.15's handler."""
        with peer.recording():
            seconds = self.plain()
        found = len(peer.handler.stacks), len(peer.handler.annotations)
        # The clones that instantiating makes are reported, too, under another graph's id.
        if min(found) < self._num_nodes:
            raise AssertionError(f"the peer recorded {found} stacks and annotations of {self._num_nodes} nodes")
        return seconds

    def whole(self, *, records: bool) -> float:
        """Entering to leaving our capture, what its end does per node included."""
        graph_ = self.last_graph = self._settings.new_graph()
        self._settings.synchronize()
        start = time.perf_counter()
        with graph(graph_, enable_annotations=records, annotation_config=WITH_STACKS if records else None):
            with mark_kernels("work") if records else nullcontext():
                deep(DEPTH, self._launch)
        return time.perf_counter() - start

    def nested(self, scope_depth: int, config: dict[str, Any] | None, *, whole: bool) -> float:
        """Scopes nested so deep, an equal share of the launches at each level on the way in and on the way out.

        Launching only, or entering to leaving the capture (``whole``). ``config`` None records nothing.
        """
        graph_ = self.last_graph = self._settings.new_graph()
        self._settings.synchronize()
        start = time.perf_counter()
        with graph(graph_, enable_annotations=config is not None, annotation_config=config):
            seconds = deep(DEPTH, partial(self._launch_nested, scope_depth))
        return time.perf_counter() - start if whole else seconds

    def _launch(self) -> float:
        add, number = self._x.add_, self._num_nodes
        start = time.perf_counter()
        for _ in range(number):
            add(1)
        return time.perf_counter() - start

    def _launch_nested(self, scope_depth: int) -> float:
        add = self._x.add_
        share = self._num_nodes // (2 * scope_depth)
        scopes: list[AbstractContextManager[None]] = []
        start = time.perf_counter()
        for level in range(scope_depth):
            scopes.append(mark_kernels({f"level {level}": level}))
            scopes[-1].__enter__()
            for _ in range(share):
                add(1)
        while scopes:
            for _ in range(share):
                add(1)
            scopes.pop().__exit__(None, None, None)
        return time.perf_counter() - start


def _per_node(recorded: list[float], plain: list[float], num_nodes: int) -> list[float]:
    """Microseconds per node of one side over the other, by round."""
    return [(one - other) / num_nodes * 1e6 for one, other in zip(recorded, plain, strict=True)]


def _check(captures: Captures, num_nodes: int) -> None:
    """What was recorded is there, so that nothing is measured that does not work."""
    nodes = capture_nodes(captures.last_graph)
    if len(nodes) != num_nodes or any(node.annotation != {"name": "work"} or not node.stack for node in nodes):
        raise AssertionError(f"of {num_nodes} nodes some have no scope or no stack: {nodes[0]}")


def recording(settings: Settings) -> list[Row]:
    """Scopes and stacks, 60 frames deep, 2,500 nodes; the handler of torch 2.15 in turns where its file is given."""
    num_nodes = settings.scaled(NUM_NODES)
    captures = Captures(settings, num_nodes)
    sides: dict[str, Callable[[], float]] = {"plain": captures.plain, "graphcap": captures.recorded}
    for side in sides.values():
        side()
    absent = _add_peer(sides, captures, settings)
    samples = alternate(sides, rounds=settings.rounds, seconds=settings.seconds)
    per_node = {side: [second / num_nodes * 1e6 for second in seconds] for side, seconds in samples.items()}
    captures.recorded()
    _check(captures, num_nodes)
    ours = _per_node(samples["graphcap"], samples["plain"], num_nodes)
    what = f"recording scopes and stacks, {DEPTH} frames deep, {num_nodes} nodes"
    first = value_row(
        "recording", f"{what}: over a plain capture", ours, unit="us/node", sides=per_node, target=_TARGET
    )
    if absent is None:
        theirs = _per_node(samples[PEER], samples["plain"], num_nodes)
        beside = ratio_row(
            "recording/peer",
            f"{what}: over a plain capture, of each",
            {"graphcap": ours, PEER: theirs},
            ours="graphcap",
            theirs=PEER,
            unit="us/node",
            target=_PEER_TARGET,
        )
    return [first, absent or beside, _whole_row(settings, captures, num_nodes, what)]


def _add_peer(sides: dict[str, Callable[[], float]], captures: Captures, settings: Settings) -> Row | None:
    """Add the peer's side; where it cannot be had, the row that says so."""
    name, what = "recording/peer", "recording by torch 2.15's handler, beside ours"
    path = find_peer(settings.peer)
    if path is None or not settings.on_cuda:
        return Row(name=name, what=what, status="skipped", target=_PEER_TARGET, note=HINT)
    try:
        side = partial(captures.by_peer, PeerSubscription(path))
        side()
    except Exception as error:  # noqa: BLE001 - what is wrong with the peer must not cost our own rows
        traceback.print_exc()
        return Row(name=name, what=what, status="failed", target=_PEER_TARGET, note=f"{type(error).__name__}: {error}")
    sides[PEER] = side
    return None


def _whole_row(settings: Settings, captures: Captures, num_nodes: int, what: str) -> Row:
    single = Captures(settings, 1)
    samples = alternate(
        {
            "recorded": partial(captures.whole, records=True),
            "plain": partial(captures.whole, records=False),
            "recorded, 1 node": partial(single.whole, records=True),
            "plain, 1 node": partial(single.whole, records=False),
        },
        rounds=settings.rounds,
        seconds=settings.seconds,
    )
    fixed = [a - b for a, b in zip(samples["recorded, 1 node"], samples["plain, 1 node"], strict=True)]
    added = [a - b for a, b in zip(samples["recorded"], samples["plain"], strict=True)]
    per_node = [(all_ - once) / (num_nodes - 1) * 1e6 for all_, once in zip(added, fixed, strict=True)]
    return value_row(
        "recording/whole",
        f"{what}: entering to leaving a capture, less what one node takes",
        per_node,
        unit="us/node",
        note=f"and once per capture {sorted(fixed)[len(fixed) // 2] * 1e3:.1f} ms, for taking CUPTI and giving it back",
        target=_TARGET,
    )


def nesting(settings: Settings) -> list[Row]:
    """The same with scopes 1 and 16 deep: by CUPTI with stacks, and by edge walk, which records no stacks."""
    return [_nesting_row(settings), _edge_walk_row(settings)]


def _nested_captures(settings: Settings) -> tuple[Captures, int]:
    num_nodes = settings.scaled(NUM_NODES)
    num_nodes -= num_nodes % (2 * max(SCOPE_DEPTHS))
    return Captures(settings, num_nodes), num_nodes


def _nesting_row(settings: Settings) -> Row:
    captures, num_nodes = _nested_captures(settings)
    sides = {
        f"{label} {depth}": partial(captures.nested, depth, config, whole=False)
        for depth in SCOPE_DEPTHS
        for label, config in (("recorded", WITH_STACKS), ("plain", None))
    }
    for side in sides.values():
        side()
    samples = alternate(sides, rounds=settings.rounds, seconds=settings.seconds)
    over = {
        f"{depth} deep": _per_node(samples[f"recorded {depth}"], samples[f"plain {depth}"], num_nodes)
        for depth in SCOPE_DEPTHS
    }
    return _flat_row("nesting", "recording scopes and stacks, over a plain capture", over)


def _edge_walk_row(settings: Settings) -> Row:
    # A difference to a plain capture would be one of noise: the walk costs next to nothing.
    captures, num_nodes = _nested_captures(settings)
    sides = {f"{depth} deep": partial(captures.nested, depth, BY_EDGES, whole=True) for depth in SCOPE_DEPTHS}
    for side in sides.values():
        side()
    samples = alternate(sides, rounds=settings.rounds, seconds=settings.seconds)
    per_node = {side: [taken / num_nodes * 1e6 for taken in values] for side, values in samples.items()}
    return _flat_row("nesting/edge-walk", "a whole capture whose scopes are found by edge walk", per_node)


def _flat_row(name: str, what: str, per_node: dict[str, list[float]]) -> Row:
    shallow, deepest = (f"{depth} deep" for depth in SCOPE_DEPTHS)
    return ratio_row(
        name,
        f"{what}: scopes {deepest} / {shallow}",
        per_node,
        ours=deepest,
        theirs=shallow,
        unit="us/node",
        target=Target(bar=1.2, aim=1.0),
    )


ROWS = {"recording": recording, "nesting": nesting}
