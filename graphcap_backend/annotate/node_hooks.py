"""Being told of each autograd node that is made, on any torch.

torch 2.14 and newer have node-creation hooks; the hook leaves what it makes in the node's
``metadata``.

Before, there is one place where autograd calls Python as it makes a node: under anomaly mode
it calls ``torch.fx.traceback.format_stack`` and keeps the answer in the node's ``metadata``.
So while a recording is attached, anomaly mode is on (without its checks for NaN) and a
function of ours answers. Threads that record nothing get what they would have got. What this
way cannot see: nodes made while nothing records, so second-order nodes of a first backward
that ran uncaptured.
"""

from __future__ import annotations

import contextlib
import importlib
import warnings
from collections.abc import Callable
from typing import Any, Final, cast

import torch

from graphcap_backend.annotate.process import PROCESS

HAS_NODE_HOOKS: Final = hasattr(torch._C._autograd, "_push_node_creation_hook")

_KEY: Final = "graphcap_origin"
_ANOMALY_KEY: Final = "traceback_"
_EXPECTED_WARNINGS: Final = r"\s*(Error detected in|Previous calculation was induced by)"


class _Carrier(list[str]):
    """What a node keeps under anomaly mode: a stack to print, and what the hook made."""

    made: Any = None


class AnomalyHooks:
    """Answers in place of ``format_stack`` while at least one recording is attached."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self.num_users = 0
        self._make = make
        self._module = cast(Any, importlib.import_module("torch.fx.traceback"))
        self._format_stack = self._module.format_stack
        self._enabled = torch.is_anomaly_enabled()
        self._checks_nan = torch.is_anomaly_check_nan_enabled()
        self._module.format_stack = self._answer
        torch.set_anomaly_enabled(True, self._checks_nan if self._enabled else False)
        # A node that raises has autograd warn with the stack it kept, of which there is none.
        self._filter = None if self._enabled else _ignore_expected()

    def _answer(self) -> list[str]:
        # AOTAutograd, which may be tracing, reads the stacks that nodes keep.
        is_read = self._enabled or self._module.should_preserve_node_meta
        carrier = _Carrier(self._format_stack() if is_read else ())
        # Whatever goes wrong here must not become an error of the user's operator.
        with contextlib.suppress(Exception):
            carrier.made = self._make()
        return carrier

    def close(self) -> None:
        """Put everything back as it was."""
        if self._module.format_stack == self._answer:
            self._module.format_stack = self._format_stack
        torch.set_anomaly_enabled(self._enabled, self._checks_nan)
        if self._filter is not None and self._filter in warnings.filters:
            warnings.filters.remove(self._filter)  # type: ignore[attr-defined]


def _ignore_expected() -> Any:
    warnings.filterwarnings("ignore", message=_EXPECTED_WARNINGS, category=UserWarning)
    return warnings.filters[0]


def push(make: Callable[[], Any], hook: Callable[[Any], None]) -> None:
    """Hear of nodes made from now on, on this thread and in backwards that it starts.

    Args:
        make: gives what a node made now is to keep; used where torch has no hooks.
        hook: the node-creation hook; used where it has.
    """
    if HAS_NODE_HOOKS:
        torch._C._autograd._push_node_creation_hook(hook)
        return
    with PROCESS.lock:
        if PROCESS.anomaly_hooks is None:
            PROCESS.anomaly_hooks = AnomalyHooks(make)
        PROCESS.anomaly_hooks.num_users += 1


def pop() -> None:
    """Undo the last ``push``, on the same thread."""
    if HAS_NODE_HOOKS:
        torch._C._autograd._pop_node_creation_hook()
        return
    with PROCESS.lock:
        hooks = PROCESS.anomaly_hooks
        if hooks is None:
            return
        hooks.num_users -= 1
        if hooks.num_users == 0:
            PROCESS.anomaly_hooks = None
            hooks.close()


def keep(node: Any, made: Any) -> None:
    """Leave something in a node, where torch has hooks."""
    node.metadata[_KEY] = made


def kept(node: Any) -> Any:
    """What was left in an autograd node when it was made, or None."""
    # A leaf's node is made once and kept, so what it says is an accident of first use.
    if isinstance(node, torch._C._functions.AccumulateGrad):
        return None
    if HAS_NODE_HOOKS:
        return node.metadata.get(_KEY)
    carrier = node.metadata.get(_ANOMALY_KEY)
    return carrier.made if isinstance(carrier, _Carrier) else None
