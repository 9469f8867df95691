"""Times of nodes: activity records joined to nodes, and shared out to what a node comes from.

Pure: no CUPTI in here, and nothing of captures but keys and labels.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

_Key = TypeVar("_Key")


class Activity(NamedTuple):
    """One kernel, copy or fill that ran."""

    name: str
    node_id: int
    """(executable graph id << 32) | node id as CUPTI reports it; 0 for work outside graphs."""
    duration_ns: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """How often something ran and how long it took, in nanoseconds."""

    count: int
    total_ns: int
    min_ns: int
    max_ns: int

    @property
    def mean_ns(self) -> float:
        return self.total_ns / self.count


def tally(durations: Iterable[tuple[_Key, int]]) -> dict[_Key, Timing]:
    """Durations in nanoseconds, each with what ran, as one timing per key."""
    found: dict[_Key, list[int]] = {}
    for key, duration in durations:
        sums = found.get(key)
        if sums is None:
            found[key] = [1, duration, duration, duration]
            continue
        sums[0] += 1
        sums[1] += duration
        if duration < sums[2]:
            sums[2] = duration
        if duration > sums[3]:
            sums[3] = duration
    return {key: Timing(count=c, total_ns=t, min_ns=low, max_ns=high) for key, (c, t, low, high) in found.items()}


def join(activities: Sequence[Activity], keys: Mapping[int, _Key]) -> tuple[dict[_Key, Timing], dict[str, Timing]]:
    """Timings by node, and by name for work that is no node of ``keys``.

    Every activity counts once: the totals of both sum up to the total of ``activities``.

    Args:
        keys: (executable graph id << 32) | node id to whatever names the node.
    """
    nodes = tally((keys[each.node_id], each.duration_ns) for each in activities if each.node_id in keys)
    others = tally((each.name, each.duration_ns) for each in activities if each.node_id not in keys)
    return nodes, others


class Weighed(NamedTuple):
    """A node with all that it comes from."""

    labels: Sequence[str]
    weight: int
    num_runs: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """What one label (a source line, a scope, a module, a kernel) has of the whole."""

    label: str
    weight: int
    """Nanoseconds, or nodes where nothing was timed."""
    shared: int
    """The part of ``weight`` that comes from nodes which other labels share."""
    num_nodes: int
    """Nodes that carry the label, shared ones included."""
    count: int
    """How often those ran."""


def share_out(nodes: Iterable[Weighed], unlabelled: str) -> tuple[Share, ...]:
    """Sums by label, heaviest first. Nothing is counted twice: a node with several labels gives each of
    them an equal part, the remainder of the division to the first ones. The weights sum up exactly.

    Args:
        unlabelled: label for nodes without one.
    """
    sums: dict[str, list[int]] = {}
    for node in nodes:
        labels = list(dict.fromkeys(node.labels)) or [unlabelled]
        part, rest = divmod(node.weight, len(labels))
        for position, label in enumerate(labels):
            mine = part + (position < rest)
            row = sums.setdefault(label, [0, 0, 0, 0])
            row[0] += mine
            row[1] += mine if len(labels) > 1 else 0
            row[2] += 1
            row[3] += node.num_runs
    shares = [
        Share(label=label, weight=weight, shared=shared, num_nodes=num_nodes, count=count)
        for label, (weight, shared, num_nodes, count) in sums.items()
    ]
    return tuple(sorted(shares, key=lambda share: (-share.weight, share.label)))


def scope_names(annotation: Mapping[str, object] | None) -> tuple[str, ...]:
    """Names of the scopes of a node: several for a kernel fused from several scopes.

    Backward work is told apart: "mlp (backward)". A scope without a name goes by its entries.
    """
    if not annotation:
        return ()
    fused = annotation.get("fused")
    phase = " (backward)" if annotation.get("autograd_phase") == "backward" else ""
    scopes = fused if isinstance(fused, (list, tuple)) and fused else [annotation]
    return tuple(dict.fromkeys(name + phase for scope in scopes if (name := _scope_name(scope))))


_OURS = ("stream", "autograd_phase", "fused")


def _scope_name(scope: object) -> str:
    if not isinstance(scope, Mapping):
        return str(scope)
    if "name" in scope:
        return str(scope["name"])
    return ", ".join(f"{key}={value}" for key, value in scope.items() if key not in _OURS)
