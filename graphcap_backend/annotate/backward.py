"""Which forward scope, and which forward line, a backward node comes from.

torch 2.14 and newer: a node-creation hook, on for the length of a recording, leaves an
``Origin`` in ``metadata`` of each autograd node, so it lives and dies with the node. Nodes
made while a marked node runs (higher orders, checkpoint recomputation) inherit it.

torch 2.11 to 2.13 tell nobody of a new autograd node, but number nodes per thread in
creation order. A recording notes which scope was in force from which number on
(``ForwardTrail``), and which node was newest when a kernel was launched: an operator makes
its node before it launches anything. The numbers are a thread's own, so this way cannot see
nodes made by another thread than the one that calls backward, which covers those that the
engine's worker threads make (higher-order gradients on CUDA): where a number could be
either's, nothing is said. Nor can it see the forward line of an operator that launched
nothing, such as a view.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from graphcap_backend.annotate import thread_state
from graphcap_backend.annotate.process import PROCESS

if TYPE_CHECKING:
    from graphcap_backend.annotate.edge_walk import EdgeWalk
    from graphcap_backend.annotate.recording import Recording
    from graphcap_backend.annotate.scopes import Scope

HAS_NODE_HOOKS: Final = hasattr(torch._C._autograd, "_push_node_creation_hook")

_TLS_KEY: Final = "graphcap_recording"
_METADATA_KEY: Final = "graphcap_origin"
_running = torch._C._current_autograd_node
_newest = torch._C._autograd._get_sequence_nr


class ThreadToken:
    """Stands for one thread; unlike its ident it is never used again."""

    __slots__ = ("__weakref__",)


class _Mine(threading.local):
    def __init__(self) -> None:
        self.token = ThreadToken()


_MINE: Final = _Mine()


class Origin(NamedTuple):
    """What an autograd node knows of the forward operator that made it (torch 2.14+)."""

    annotation: Mapping[str, Any] | None
    traceback: Any
    """Raw traceback of the operator, or None where stacks were not recorded."""


class Launch(NamedTuple):
    """What is noted of autograd when a node of the graph is created; read when sealed."""

    running: bool
    """Whether an autograd node ran, so this is backward work."""
    number: int
    """Of the running autograd node; in forward work, of the one made last."""
    token: ThreadToken | None = None
    """The thread that made the autograd node (torch 2.11 to 2.13)."""
    origin: Origin | None = None
    """What the running node carries (torch 2.14+)."""


def running_node() -> int | None:
    """Number of the autograd node that runs on this thread, or None outside backward."""
    node = _running()
    return None if node is None else node._sequence_nr()


class Attached(NamedTuple):
    """The recording that thread-local state carries, and the thread that put it there."""

    recording: Recording
    token: ThreadToken


def attach(recording: Recording) -> Attached | None:
    """Make ``recording`` that of this thread and of the backwards it starts.

    Returns:
        What was attached before, for ``detach``.
    """
    outer = attached()
    thread_state.put(_TLS_KEY, Attached(recording, _MINE.token))
    if HAS_NODE_HOOKS:
        torch._C._autograd._push_node_creation_hook(_on_autograd_node)
    return outer


def detach(outer: Attached | None) -> None:
    """Undo ``attach``, on the same thread; elsewhere there is nothing to undo."""
    if attached() is None:
        return
    if HAS_NODE_HOOKS:
        torch._C._autograd._pop_node_creation_hook()
    if outer is None:
        thread_state.remove(_TLS_KEY)
    else:
        thread_state.put(_TLS_KEY, outer)


def attached() -> Attached | None:
    """What this thread, or whoever called the backward it works on, attached."""
    found: Attached | None = thread_state.get(_TLS_KEY)
    return found


def current_walk() -> EdgeWalk | None:
    """The edge walk that has to hear of scopes opened on this thread."""
    found = attached()
    return None if found is None else found.recording.walk


def note_scope(scope: Scope | None) -> None:
    """``scope`` is in force on this thread from now on."""
    if HAS_NODE_HOOKS:
        return
    found = attached()
    if found is not None:
        found.recording.trail.note(_MINE.token, _newest(), scope)


def launch() -> Launch | None:
    """What autograd says about the graph node being created; cheap, read late."""
    node = _running()
    if node is not None:
        return running_launch(node)
    if HAS_NODE_HOOKS or not torch.is_grad_enabled():
        return None
    return Launch(False, _newest() - 1, _MINE.token)


def running() -> Launch | None:
    """The same for work between here and the next change; None outside backward."""
    node = _running()
    return None if node is None else running_launch(node)


def future_launch(node: Any, token: ThreadToken) -> Launch:
    """``launch`` of the work that an autograd node is about to do."""
    number: int = node._sequence_nr()
    return Launch(True, number, None, origin_of(node)) if HAS_NODE_HOOKS else Launch(True, number, token)


def running_launch(node: Any) -> Launch:
    """``launch`` of the work that an autograd node does."""
    number: int = node._sequence_nr()
    if HAS_NODE_HOOKS:
        return Launch(True, number, None, origin_of(node))
    found = attached()
    token = None if found is None else found.token
    if token is not None and token is not _MINE.token and _newest() > number:
        # This worker thread has made nodes of its own, and one of them had that number.
        token = None
    return Launch(True, number, token)


def origin_of(node: Any) -> Origin | None:
    """The origin left in an autograd node by the creation hook."""
    found: Origin | None = node.metadata.get(_METADATA_KEY)
    return found


def _on_autograd_node(node: Any) -> None:
    """Creation hook: remember scope and line of the operator that makes ``node``."""
    from graphcap_backend.annotate.scopes import current_scope

    # A leaf's node is made once and kept, so its scope would be an accident of first use.
    if isinstance(node, torch._C._functions.AccumulateGrad):
        return
    metadata = node.metadata
    if _METADATA_KEY in metadata:
        return
    scope = current_scope()
    annotation = scope.annotation if scope is not None and scope.freezes else None
    traceback = None
    running = _running()
    outer = None if running is None else origin_of(running)
    if running is not None and outer is not None:
        traceback = outer.traceback
        if outer.annotation is not None:
            annotation = inherited(scope, outer.annotation, running_node())
    if traceback is None:
        found = attached()
        if found is not None and found.recording.gathers:
            traceback = torch._C._profiler.gather_traceback(True, False, False)
    if annotation is None and traceback is None:
        return
    metadata[_METADATA_KEY] = Origin(annotation, traceback)
    if annotation is not None:
        node.register_prehook(_pass_on)


def _pass_on(_grads: Any) -> None:
    """Have nodes made while a marked node runs inherit from it, recording or not.

    Nothing is popped: the engine runs each node under a guard that puts thread-local state,
    the list of creation hooks included, back afterwards, also when the node raises.
    """
    torch._C._autograd._push_node_creation_hook(_on_autograd_node)


def inherited(scope: Scope | None, frozen: Mapping[str, Any], running: int | None) -> dict[str, Any]:
    """The annotation of work that an autograd node with ``frozen`` does under ``scope``.

    Scopes opened round the backward lie outside what the node carries, scopes opened by the
    node's own code inside.
    """
    from graphcap_backend.annotate.scopes import merge_annotations

    inner = []
    while scope is not None and scope.running is not None and scope.running == running:
        inner.append(scope.own)
        scope = scope.parent
    merged = merge_annotations({} if scope is None else scope.annotation, frozen)
    for own in reversed(inner):
        merged = merge_annotations(merged, own)
    return merged


class ForwardTrail:
    """Scopes and launches of one recording by autograd number (torch 2.11 to 2.13).

    Held by the graph's record, so a backward captured later finds it while the forward's
    graph lives; known process-wide only weakly.
    """

    def __init__(self) -> None:
        self._scopes: dict[ThreadToken, list[tuple[int, Scope | None]]] = {}
        self._ends: dict[ThreadToken, int] = {}
        self._tracebacks: dict[tuple[ThreadToken, int], Any] = {}

    def open(self, scope: Scope | None) -> None:
        """The recording begins on this thread."""
        self.note(_MINE.token, _newest(), scope)
        with PROCESS.lock:
            PROCESS.trails.add(self)

    def close(self) -> None:
        """The recording ends, on the thread that began it."""
        self._ends[_MINE.token] = _newest()

    def note(self, token: ThreadToken, number: int, scope: Scope | None) -> None:
        """Autograd nodes of the thread from ``number`` on are made under ``scope``."""
        self._scopes.setdefault(token, []).append((number, scope))

    def note_launch(self, launch: Launch, traceback: Any) -> None:
        """Forward work was launched; the first launch after a node is made is that node's."""
        if launch.token is not None:
            self._tracebacks.setdefault((launch.token, launch.number), traceback)

    def scope(self, token: ThreadToken, number: int) -> Scope | None:
        """The scope under which the node was made, if it was made in this recording."""
        noted = self._scopes.get(token)
        if not noted or number >= self._ends.get(token, number + 1):
            return None
        at = bisect_right(noted, number, key=lambda entry: entry[0]) - 1
        return None if at < 0 else noted[at][1]

    def traceback(self, token: ThreadToken, number: int) -> Any:
        """Raw traceback of the forward work of the node, or None."""
        return self._tracebacks.get((token, number))


def find_origin(launch: Launch) -> Origin | None:
    """What is known of the autograd node that ran: by itself, or by recordings still alive."""
    token = launch.token
    if token is None:
        return launch.origin
    with PROCESS.lock:
        trails = list(PROCESS.trails)
    annotation: Mapping[str, Any] | None = None
    traceback = None
    for trail in trails:
        scope = trail.scope(token, launch.number)
        if scope is not None and scope.freezes:
            annotation = scope.annotation
        traceback = traceback or trail.traceback(token, launch.number)
    return Origin(annotation, traceback)
