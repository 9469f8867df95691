"""Scopes: the annotation in force where a node is created.

The scope in force lives in autograd's thread-local state (``torch._C._stash_obj_in_tls``),
which the engine copies to its worker threads for the length of a backward, so
multithreaded autograd needs no switch. Scopes are immutable, merged once at entry: a node
only stores a reference.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

import torch

from graphcap_backend.annotate import backward as _backward
from graphcap_backend.annotate import thread_state
from graphcap_backend.annotate.process import PROCESS

if TYPE_CHECKING:
    from graphcap_backend.annotate.edge_walk import EdgeWalk

_TLS_KEY: Final = "graphcap_scope"

FORWARD_ONLY: Final = "graphcap_forward_only"
"""Key in a traced annotation that backward kernels must not carry; never shown to users."""


class Scope:
    """One open scope, merged with those around it. Never changed once made."""

    __slots__ = ("annotation", "freezes", "own", "parent", "running")

    def __init__(self, own: Mapping[str, Any], parent: Scope | None, freezes: bool) -> None:
        self.own: Final = own
        self.parent: Final = parent
        self.annotation: Final[Mapping[str, Any]] = own if parent is None else merge_annotations(parent.annotation, own)
        self.freezes: Final[bool] = freezes or (parent is not None and parent.freezes)
        """Whether autograd nodes made inside pass the annotation on to their backward."""
        self.running: Final = _backward.running_node()
        """The autograd node inside whose execution the scope was opened, or None."""


def merge_annotations(outer: Mapping[str, Any], inner: Mapping[str, Any]) -> dict[str, Any]:
    """A new dict of both, key by key and dict by dict; where they differ ``inner`` wins."""
    merged = dict(outer)
    for key, value in inner.items():
        under = merged.get(key)
        if isinstance(value, dict) and isinstance(under, dict):
            merged[key] = merge_annotations(under, value)
        else:
            merged[key] = value
    return merged


def current_scope() -> Scope | None:
    """The scope in force on this thread, as autograd's thread-local state has it."""
    scope: Scope | None = thread_state.get(_TLS_KEY)
    return scope


def _put(scope: Scope | None) -> None:
    if scope is None:
        thread_state.remove(_TLS_KEY)
    else:
        thread_state.put(_TLS_KEY, scope)


def _as_dict(annotation: str | Mapping[str, Any]) -> dict[str, Any]:
    if isinstance(annotation, str):
        return {"name": annotation}
    if isinstance(annotation, dict):
        return dict(annotation)
    raise TypeError(f"an annotation is a str or a dict, got {type(annotation).__name__}: {annotation!r}")


class _OpenScope:
    """A scope round a ``with`` block, while something records."""

    __slots__ = ("_freezes", "_outer", "_own", "_walk")

    def __init__(self, own: Mapping[str, Any], freezes: bool) -> None:
        self._own = own
        self._freezes = freezes
        self._outer: Scope | None = None
        self._walk: EdgeWalk | None = None

    def __enter__(self) -> None:
        self._outer = current_scope()
        scope = Scope(self._own, self._outer, self._freezes)
        self._walk = _backward.current_walk()
        if self._walk is not None:
            self._walk.mark(scope)
        _put(scope)

    def __exit__(self, *exc_info: object) -> None:
        _put(self._outer)
        if self._walk is not None:
            self._walk.mark(self._outer)


class _NoScope:
    __slots__ = ()

    def __enter__(self) -> None:
        pass

    def __exit__(self, *exc_info: object) -> None:
        pass


_NO_SCOPE: Final = _NoScope()


def mark_kernels(annotation: str | dict[str, Any], *, backward: bool = True) -> contextlib.AbstractContextManager[None]:
    """Annotate the nodes captured inside a ``with`` block.

    A str ``s`` means ``{"name": s}``. Nested scopes merge key by key, nested dicts too, and
    the inner scope wins. Values must be picklable; they are kept by reference, so don't
    change them afterwards. The key "autograd_phase" is reserved, and so is "stream".

    With ``backward=True`` the backward work of what runs inside, in this capture or a later
    one, carries the same annotation plus ``"autograd_phase": "backward"``; accumulation
    into leaves (``AccumulateGrad``) never does.

    In code that ``torch.compile`` traces, the scope becomes metadata of the traced
    operators and reaches the kernels made from them, forward and backward. A kernel fused
    from several scopes carries all of them: their dicts are merged in the order of the fused
    operators, and where values differ the first stays under its key and "fused" lists each
    scope's whole annotation.

    Outside an annotated capture it does nothing.

    Raises:
        TypeError: ``annotation`` is neither a str nor a dict.
    """
    if torch.compiler.is_compiling():
        own = _as_dict(annotation)
        return torch.fx.traceback.annotate({"graphcap": _merged_while_tracing(own, backward)})
    if not PROCESS.num_recording:
        if not isinstance(annotation, (str, dict)):
            _as_dict(annotation)
        return _NO_SCOPE
    return _OpenScope(_as_dict(annotation), backward)


def _merged_while_tracing(own: dict[str, Any], backward: bool) -> dict[str, Any]:
    """``own`` merged into the scope being traced; run by Dynamo itself, at trace time."""
    custom = torch.fx.traceback.current_meta.get("custom") or {}
    outer = custom.get("graphcap") or {}
    merged = merge_annotations(outer, own)
    # As for eager scopes: backward work carries all of them once one of them asks for it.
    if backward or (outer and not outer.get(FORWARD_ONLY)):
        merged.pop(FORWARD_ONLY, None)
    else:
        merged[FORWARD_ONLY] = True
    return merged


# What torch.compiler.assume_constant_result sets; calling that here would import Dynamo.
_merged_while_tracing._dynamo_marked_constant = True  # type: ignore[attr-defined]


@contextlib.contextmanager
def mark_stream(stream: torch.cuda.Stream, annotation: str | dict[str, Any]) -> Iterator[None]:
    """Make ``stream`` current inside a ``with`` block and annotate what is captured there.

    Where ``stream`` is not the current one already, the reserved key "stream" of the
    annotation is a small number that stands for it, the same one for the life of the
    process: a lane for trace viewers. The caller's dict is left as it is.
    """
    own = _as_dict(annotation)
    if PROCESS.num_recording and stream.cuda_stream != torch.cuda.current_stream().cuda_stream:
        own["stream"] = PROCESS.lane(stream.cuda_stream)
    with mark_kernels(own), torch.cuda.stream(stream):
        yield
