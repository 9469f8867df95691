"""Backward nodes under an edge walk: a mark before each.

While an edge walk records, ``torch.autograd.backward`` and ``grad`` reach the engine through
a function of ours. It walks the autograd graph once and has every node make a mark before it
runs, for this one run. What is launched until the next node begins is the node's: the engine
sums up gradients behind it, past any hook. Backwards started on threads that record nothing,
or that record with CUPTI, go straight through.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from graphcap_backend.annotate import backward
from graphcap_backend.annotate.process import PROCESS
from graphcap_backend.annotate.scopes import current_scope

if TYPE_CHECKING:
    from graphcap_backend.annotate.edge_walk import EdgeWalk


class Switch:
    """Stands in for the engine's entry while walks record."""

    def __init__(self, engine: Callable[..., Any]) -> None:
        self.engine = engine
        self.num_walks = 0

    def __call__(self, outputs: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        walk = backward.current_walk()
        if walk is None:
            return self.engine(outputs, *args, **kwargs)
        handles = []
        try:
            for node in _nodes(outputs):
                handles.append(_marked(node, walk))
            return self.engine(outputs, *args, **kwargs)
        finally:
            for handle in handles:
                handle.remove()
            walk.mark(current_scope())


def watch_backwards(change: int) -> None:
    """One walk more (1) or less (-1) wants backward nodes marked."""
    autograd: Any = torch.autograd
    with PROCESS.lock:
        switch = autograd._engine_run_backward
        if not isinstance(switch, Switch):
            if change < 0:
                return  # somebody put the engine's own entry back, ours with it
            switch = autograd._engine_run_backward = Switch(switch)
        switch.num_walks += change
        if switch.num_walks == 0:
            autograd._engine_run_backward = switch.engine


def _marked(node: Any, walk: EdgeWalk) -> Any:
    launch = backward.launch_of(node)
    known = launch if launch.origin is not None and launch.origin.annotation is not None else None

    def before(_grads: Any) -> None:
        walk.mark_node(current_scope(), known)

    return node.register_prehook(before)


def _nodes(outputs: Sequence[Any]) -> Iterator[Any]:
    """All autograd nodes that can run in a backward of ``outputs``."""
    # An output is a tensor or a GradientEdge.
    waiting = [getattr(output, "node", None) or getattr(output, "grad_fn", None) for output in outputs]
    seen = set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        waiting.extend(follower for follower, _ in node.next_functions)
