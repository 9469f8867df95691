"""Where kernels of Inductor-generated wrappers come from, per call site.

With ``trace.provenance_tracking_level = 1`` a wrapper carries a comment such as
``# [Provenance debug handles] triton_poi_fused_gelu_0:2`` just above each kernel call, and
the compiled graph keeps the stack of every operator fused into it under that handle. A
kernel name is no identity (twelve layers may call one kernel); the wrapper's line is.
"""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from graphcap_backend.annotate.process import PROCESS
from graphcap_backend.annotate.scopes import FORWARD_ONLY, merge_annotations
from graphcap_backend.fx_traces import SCOPE_FRAME, read_scope_frame

Frame = tuple[str, int, str]
"""File, line, function."""

_COMMENT: Final = re.compile(r"^\s*# \[Provenance debug handles\] (.+?)\s*$")
_FRAME: Final = re.compile(r'^\s*File "(.+)", line (\d+), in (.+?)\s*$', re.MULTILINE)
_STREAM: Final = re.compile(r"^stream\d+ = ")
_NO_MAPPING: Final[Mapping[str, Any]] = MappingProxyType({})
_serials: Final = itertools.count()


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelOrigin:
    """What one kernel call of a wrapper was fused from."""

    chains: tuple[tuple[Frame, ...], ...]
    """One per fused operator: its frames in the model, innermost first. No two are equal."""
    modules: tuple[str, ...] = ()
    """Paths of the modules whose operators were fused, as the compiler names them."""
    annotation: Mapping[str, Any] | None = None
    """Scopes traced into the region; None where no fused operator was in one."""
    backward_annotation: Mapping[str, Any] | None = None
    """The same without scopes that asked not to be passed on to backward work."""


class WrapperOrigins:
    """One generated module: the origin of each line that calls a kernel.

    Known process-wide by its path, weakly: whoever compiled the region holds it. A record
    of a captured graph keeps what it needs until its stacks are resolved.
    """

    def __init__(self, path: str, by_line: Mapping[int, KernelOrigin]) -> None:
        self.path: Final = path
        self.by_line: Final = by_line
        self.serial: Final = next(_serials)
        """Where two are known for one path, the higher one is the newer."""
        self.annotated: Final = any(origin.annotation for origin in by_line.values())

    def at(self, line: int) -> KernelOrigin | None:
        """The origin of the kernel that ``line`` calls, or None where it calls none."""
        return self.by_line.get(line)


def register_wrapper(
    *,
    path: str,
    source_code: str,
    stack_traces: Mapping[str, Sequence[str]],
    modules: Mapping[str, Sequence[str]] = _NO_MAPPING,
    annotations: Mapping[str, Sequence[Mapping[str, Any]]] = _NO_MAPPING,
) -> WrapperOrigins:
    """Make the origins of one generated module known.

    Args:
        path: file of the module, as its code objects name it.
        source_code: the module's text.
        stack_traces: handle ("triton_poi_fused_gelu_0:2") to the stacks of the operators
            fused into that call, each as Python formats one, outermost first.
        modules: handle to module paths.
        annotations: handle to the annotation of each fused operator that has one, in order.

    Returns:
        The object to hold as long as the region lives.
    """
    by_line: dict[int, KernelOrigin] = {}
    for handles, lines in _call_sites(source_code):
        scopes = [scope for name in handles for scope in annotations.get(name, ()) if scope]
        origin = _origin(
            chains=_chains(text for name in handles for text in stack_traces.get(name, ())),
            modules=_unique(path for name in handles for path in modules.get(name, ())),
            scopes=scopes,
        )
        by_line.update(dict.fromkeys(lines, origin))
    origins = WrapperOrigins(path, by_line)
    with PROCESS.lock:
        PROCESS.wrappers.add(origins)
    return origins


def known_wrappers() -> dict[str, WrapperOrigins]:
    """Path to origins of all generated modules known now; the newest per path."""
    with PROCESS.lock:
        alive = sorted(PROCESS.wrappers, key=lambda origins: origins.serial)
    return {origins.path: origins for origins in alive}


def parse_stack(text: str) -> tuple[Frame, ...]:
    """Frames of a stack as Python formats one, innermost first."""
    return tuple((file, int(line), function) for file, line, function in reversed(_FRAME.findall(text)))


def mapped_origin(frames: Sequence[Frame]) -> KernelOrigin:
    """The origin of a call without a handle, from the frames that Inductor's line map has for its line.

    Among them is the pseudo frame that carries module and scope, which is no part of the chain.
    """
    chain = tuple(frame for frame in frames if not frame[0].startswith(SCOPE_FRAME))
    carried = [read_scope_frame(file) for file, _, _ in frames if file.startswith(SCOPE_FRAME)]
    return _origin(
        chains=(chain,) if chain else (),
        modules=_unique(origin["module"] for origin in carried if "module" in origin),
        scopes=[origin["scope"] for origin in carried if "scope" in origin],
    )


def _origin(
    *, chains: tuple[tuple[Frame, ...], ...], modules: tuple[str, ...], scopes: Sequence[Mapping[str, Any]]
) -> KernelOrigin:
    return KernelOrigin(
        chains=chains,
        modules=modules,
        annotation=_fused_annotation(scopes),
        backward_annotation=_fused_annotation([scope for scope in scopes if not scope.get(FORWARD_ONLY)]),
    )


def _call_sites(source_code: str) -> Iterator[tuple[list[str], range]]:
    """Handles and the lines of the statement they name, in the order of the source."""
    lines = source_code.splitlines()
    comments = [
        (number, [handle.strip() for handle in match[1].split(",")])
        for number, line in enumerate(lines, start=1)
        if (match := _COMMENT.match(line))
    ]
    if not comments:
        return
    statements = _statements(source_code)
    ends = [number for number, _ in comments[1:]] + [len(lines) + 1]
    for (number, handles), end in zip(comments, ends, strict=True):
        # Handles of one call may stand on several comment lines, so an empty stretch is
        # joined with what follows it.
        names = tuple(handle.rpartition(":")[0] for handle in handles)
        inside = [span for span in statements if number < span.start < end]
        span = _calling(inside, lines, names) or _first_stretch(statements, number)
        if span is not None:
            yield handles, span


def _calling(spans: list[range], lines: list[str], names: tuple[str, ...]) -> range | None:
    """The first statement that calls one of ``names``; else the first that is no set-up."""
    for span in spans:
        text = "\n".join(lines[span.start - 1 : span.stop - 1])
        if any(name and name in text for name in names):
            return span
    for span in spans:
        if not _STREAM.match(lines[span.start - 1].strip()):
            return span
    return None


def _first_stretch(statements: list[range], number: int) -> range | None:
    return next((span for span in statements if span.start > number), None)


def _statements(source_code: str) -> list[range]:
    """Line ranges of the simple statements, in order."""
    try:
        tree = ast.parse(source_code)
    except SyntaxError:
        return []
    spans = [
        range(node.lineno, (node.end_lineno or node.lineno) + 1)
        for node in ast.walk(tree)
        if isinstance(node, (ast.Expr, ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Return))
    ]
    return sorted(spans, key=lambda span: span.start)


def _chains(texts: Iterator[str]) -> tuple[tuple[Frame, ...], ...]:
    return tuple(chain for chain in dict.fromkeys(parse_stack(text) for text in texts) if chain)


def _unique(names: Iterator[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(names))


def _fused_annotation(scopes: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """All scopes of one kernel in one dict; see ``mark_kernels``."""
    distinct: list[dict[str, Any]] = []
    for scope in scopes:
        shown = {key: value for key, value in scope.items() if key != FORWARD_ONLY}
        if shown not in distinct:
            distinct.append(shown)
    if not distinct:
        return None
    merged: dict[str, Any] = {}
    for shown in distinct:
        merged = merge_annotations(shown, merged)
    if len(distinct) > 1:
        merged["fused"] = distinct
    return merged
