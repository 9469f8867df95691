"""Backward nodes under an edge walk: a mark before and after each that carries a scope.

While an edge walk records, ``torch.autograd.backward`` and ``grad`` reach the engine through
a function of ours. It walks the autograd graph once and brackets the nodes whose forward
scope is known, for this one run. Backwards started on threads that record nothing, or that
record with CUPTI, go straight through.
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
                handles += _bracket(node, walk)
            return self.engine(outputs, *args, **kwargs)
        finally:
            for handle in handles:
                handle.remove()
            walk.mark(current_scope())  # a node that raised had no second mark


def watch_backwards(change: int) -> None:
    """One walk more (1) or less (-1) wants backward nodes bracketed."""
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


def _bracket(node: Any, walk: EdgeWalk) -> list[Any]:
    launch = backward.launch_of(node)
    if launch.origin is None or launch.origin.annotation is None:
        return []

    def before(_grads: Any) -> None:
        walk.mark_node(current_scope(), launch)

    def after(_inputs: Any, _outputs: Any) -> None:
        walk.mark_node(current_scope(), None)

    return [node.register_prehook(before), node.register_hook(after)]


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
