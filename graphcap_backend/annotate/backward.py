"""Which forward scope, and which forward line, a backward node comes from.

While a recording is attached to a thread, each autograd node made there, or in a backward
started there, keeps an ``Origin`` (``node_hooks``), so it lives and dies with the node and
is found by whichever capture runs the node. Nodes made while another runs (higher orders,
checkpoint recomputation) inherit from that one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from graphcap_backend.annotate import node_hooks, thread_state

if TYPE_CHECKING:
    from graphcap_backend.annotate.edge_walk import EdgeWalk
    from graphcap_backend.annotate.recording import Recording
    from graphcap_backend.annotate.scopes import Scope

_TLS_KEY: Final = "graphcap_recording"
_running = torch._C._current_autograd_node


class Origin(NamedTuple):
    """What an autograd node knows of the forward operator that made it."""

    annotation: Mapping[str, Any] | None
    traceback: Any
    """Raw traceback of the operator, or None where stacks were not recorded."""


class Launch(NamedTuple):
    """What is noted of autograd when backward work is launched; read when sealed."""

    number: int
    """Of the autograd node that runs."""
    origin: Origin | None


def running_node() -> int | None:
    """Number of the autograd node that runs on this thread, or None outside backward."""
    node = _running()
    return None if node is None else node._sequence_nr()


def attach(recording: Recording) -> Recording | None:
    """Make ``recording`` that of this thread and of the backwards it starts.

    Returns:
        What was attached before, for ``detach``.
    """
    outer = attached()
    thread_state.put(_TLS_KEY, recording)
    node_hooks.push(_made_now, _on_autograd_node)
    return outer


def detach(recording: Recording, outer: Recording | None) -> None:
    """Undo ``attach``, on the same thread; elsewhere there is nothing to undo."""
    if attached() is not recording:
        return
    node_hooks.pop()
    if outer is None:
        thread_state.remove(_TLS_KEY)
    else:
        thread_state.put(_TLS_KEY, outer)


def attached() -> Recording | None:
    """What this thread, or whoever called the backward it works on, attached."""
    found: Recording | None = thread_state.get(_TLS_KEY)
    return found


def current_walk() -> EdgeWalk | None:
    """The edge walk that has to hear of scopes opened on this thread."""
    found = attached()
    return None if found is None else found.walk


def running() -> Launch | None:
    """What autograd says about work launched now; None outside backward."""
    node = _running()
    return None if node is None else launch_of(node)


def launch_of(node: Any) -> Launch:
    """``running`` of the work that an autograd node does."""
    return Launch(node._sequence_nr(), node_hooks.kept(node))


def _made_now() -> Origin | None:
    """The origin of an autograd node that is made now, on this thread."""
    from graphcap_backend.annotate.scopes import current_scope

    scope = current_scope()
    annotation = scope.annotation if scope is not None and scope.freezes else None
    traceback = None
    launch = running()
    if launch is not None and launch.origin is not None:
        traceback = launch.origin.traceback
        if launch.origin.annotation is not None:
            annotation = inherited(scope, launch.origin.annotation, launch.number)
    if traceback is None:
        found = attached()
        if found is not None and found.gathers:
            traceback = torch._C._profiler.gather_traceback(True, False, False)
    return None if annotation is None and traceback is None else Origin(annotation, traceback)


def _on_autograd_node(node: Any) -> None:
    """Creation hook of torch 2.14 and newer; fires once per hook that is pushed."""
    if isinstance(node, torch._C._functions.AccumulateGrad) or node_hooks.kept(node) is not None:
        return
    origin = _made_now()
    if origin is None:
        return
    node_hooks.keep(node, origin)
    if origin.annotation is not None:
        node.register_prehook(_pass_on)


def _pass_on(_grads: Any) -> None:
    """Have nodes made while a marked node runs inherit from it, recording or not.

    Nothing is popped: the engine runs each node under a guard that puts thread-local state,
    the list of creation hooks included, back afterwards, also when the node raises.
    """
    node_hooks.push(_made_now, _on_autograd_node)


def inherited(scope: Scope | None, frozen: Mapping[str, Any], number: int) -> dict[str, Any]:
    """The annotation of work that an autograd node with ``frozen`` does under ``scope``.

    Scopes opened round the backward lie outside what the node carries, scopes opened by the
    node's own code inside.
    """
    from graphcap_backend.annotate.scopes import merge_annotations

    inner = []
    while scope is not None and scope.running == number:
        inner.append(scope.own)
        scope = scope.parent
    merged = merge_annotations({} if scope is None else scope.annotation, frozen)
    for own in reversed(inner):
        merged = merge_annotations(merged, own)
    return merged
