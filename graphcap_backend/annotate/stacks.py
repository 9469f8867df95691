"""Raw tracebacks to text: "file:line:function" lines, innermost first.

Tracebacks are symbolized in one batch, late. Where the stack passes through a module that
Inductor generated, the model's lines take its place: exactly, per call site, where the
compiled region's origins are known, else as Inductor's own line map has them.
"""

from __future__ import annotations

import importlib
import os
import sys
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import graphcap_backend
from graphcap_backend.annotate.origins import (
    Frame,
    KernelOrigin,
    WrapperOrigins,
    known_wrappers,
    mapped_origin,
    parse_stack,
)
from graphcap_backend.annotate.process import PROCESS
from graphcap_backend.fx_traces import SCOPE_FRAME

_OWN_ROOT: Final = str(Path(graphcap_backend.__file__ or "").parent) + os.sep
_DEMO: Final = _OWN_ROOT + "demo.py"
_FRAMEWORKS: Final = ("torch", "triton", "cuda.bindings", "cupti")
_GENERATED_NAMES: Final = ("<frozen ", "<eval_with_key>", "<__array_function__")
_LAUNCHER_OWNERS: Final = ("triton_heuristics.py", "static_triton_launcher.py", "static_cuda_launcher.py")

LineMap = Mapping[str, Any]
"""Inductor's: path to (first lines, formatted stacks), or to nothing."""


@dataclass(frozen=True, kw_only=True, slots=True, weakref_slot=True)
class Provenance:
    """What is needed to see through generated modules, as it was when a capture ended."""

    wrappers: Mapping[str, WrapperOrigins]
    line_maps: LineMap

    def is_generated(self, file: str) -> bool:
        """Whether Inductor wrote ``file``."""
        return file in self.wrappers or file in self.line_maps

    def origin(self, file: str, line: int) -> KernelOrigin | None:
        """What the kernel that this line of a generated module calls was fused from."""
        wrapper = self.wrappers.get(file)
        return None if wrapper is None else wrapper.at(line)

    def mapped(self, file: str, line: int) -> tuple[Frame, ...]:
        """The frames that Inductor's line map has for the line, innermost first; see ``mapped_origin``."""
        lines, stacks = self.line_maps.get(file) or ((), ())
        text = None
        for first, stack in zip(lines, stacks, strict=True):
            if first > line:
                break
            text = stack
        return parse_stack(text) if text else ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """What the stack of one node says."""

    stack: str | None
    sources: tuple[str, ...]
    modules: tuple[str, ...] = ()
    annotation: Mapping[str, Any] | None = None
    """Scopes traced into the compiled region that launched it."""
    backward_annotation: Mapping[str, Any] | None = None
    """The same for a launch in backward."""
    is_compiled: bool = False
    """Whether a module that Inductor generated launched it."""


class StackFilter:
    """Which frames are left out of a stack.

    ``paths`` None leaves out frameworks, generated code and graphcap itself; a list leaves
    out exactly what lies in these directories.
    """

    def __init__(self, paths: Sequence[str] | None, provenance: Provenance) -> None:
        self._default = paths is None
        self._provenance = provenance
        self._roots = tuple(_root(path) for path in (_default_roots() if paths is None else paths))
        self._known: dict[str, bool] = {}

    def omits(self, file: str) -> bool:
        """Whether frames of ``file`` are left out."""
        known = self._known.get(file)
        if known is None:
            known = self._known[file] = self._decide(file)
        return known

    def omits_at(self, frames: Sequence[Frame], at: int) -> bool:
        """Whether this frame of a stack is left out; some are known by their caller only."""
        return self.omits(frames[at][0]) or (self._default and _is_triton_launcher(frames, at))

    def _decide(self, file: str) -> bool:
        if file.startswith(SCOPE_FRAME):
            return True  # no frame, but what rides through Inductor in one
        if file.startswith("<"):
            return self._default and file.startswith(_GENERATED_NAMES)
        if self._default and self._provenance.is_generated(file):
            return True
        if self._default and file == _DEMO:
            return False  # its model stands for the user's
        return _absolute(file).startswith(self._roots)


def _absolute(path: str) -> str:
    # Not resolved: a link stays what the code object says it is, as in torch's filter.
    return os.path.normcase(os.path.abspath(path))  # noqa: PTH100


def _root(path: str) -> str:
    return _absolute(path).rstrip(os.sep) + os.sep


def absolute_filter_paths(paths: Sequence[str] | None) -> tuple[str, ...] | None:
    """Filter paths with relative ones resolved now; called when a capture begins."""
    return None if paths is None else tuple(_absolute(path) for path in paths)


def _default_roots() -> Iterator[str]:
    yield _OWN_ROOT
    yield str(Path(importlib.__file__ or "").parent)
    for name in _FRAMEWORKS:
        # What is not imported has no frames.
        yield from getattr(sys.modules.get(name), "__path__", ())
    if folder := os.environ.get("TORCHINDUCTOR_CACHE_DIR"):
        yield folder
    if (folders := sys.modules.get("torch._inductor.runtime.cache_dir_utils")) is not None:
        yield folders.default_cache_dir()


def symbolize(tracebacks: Sequence[Any]) -> list[list[Frame]]:
    """Frames of raw tracebacks, innermost first, in one batch."""
    import torch

    if not tracebacks:
        return []
    return [
        [(frame["filename"], int(frame["line"]), frame["name"]) for frame in frames]
        for frames in torch._C._profiler.symbolize_tracebacks(list(tracebacks))
    ]


def describe(frames: Sequence[Frame], provenance: Provenance, filter_: StackFilter, default: StackFilter) -> Launch:
    """What the stack of a node says about its launch.

    The stack begins with the model's line: for a compiled kernel the innermost line of each
    operator fused into it, then the lines of the model that led there, then the frames that
    called the compiled region.
    """
    kept: list[Frame] = []
    origin: KernelOrigin | None = None
    region: tuple[str, str] | None = None
    at = _first_foreign(frames)
    while at < len(frames):
        file, line, function = frame = frames[at]
        at += 1
        if not provenance.is_generated(file):
            # The function that Dynamo compiled, as it rewrote it, has its line in the chain.
            if (file, function) != region and not filter_.omits_at(frames, at - 1):
                kept.append(frame)
            region = region if filter_.omits(file) else None
            continue
        if not filter_.omits(file):
            kept.append(frame)
        mapped = provenance.mapped(file, line)
        if tuple(frames[at : at + len(mapped)]) == mapped:
            at += len(mapped)  # the symbolizer put them there
        by_map = mapped_origin(mapped)
        found = provenance.origin(file, line) or by_map
        if chains := found.chains or by_map.chains:
            kept.extend(_joined(chains, filter_))
            region = chains[0][-1][0], chains[0][-1][2]
        if chains or mapped or found.modules or found.annotation:
            origin = origin or found
    lines = tuple(_text(frame) for frame in kept)
    if origin is None:
        sources = tuple(_text(frame) for frame in kept[:1])
    else:
        sources = tuple(_text(frame) for frame in _innermost(origin.chains, default))
    return Launch(
        stack="\n".join(lines) or None,
        sources=sources,
        modules=() if origin is None else origin.modules,
        annotation=None if origin is None else origin.annotation,
        backward_annotation=None if origin is None else origin.backward_annotation,
        is_compiled=origin is not None,
    )


def _is_triton_launcher(frames: Sequence[Frame], at: int) -> bool:
    """Inductor makes the function that launches a Triton kernel by ``exec`` of a string."""
    file, _, function = frames[at]
    return (
        file == "<string>"
        and function == "launcher"
        and frames[at + 1 :][:1] != []
        and (frames[at + 1][0].endswith(_LAUNCHER_OWNERS))
    )


def _first_foreign(frames: Sequence[Frame]) -> int:
    """Past the recorder's own frames: they are no part of the program."""
    at = 0
    while at < len(frames) and frames[at][0].startswith(_OWN_ROOT):
        at += 1
    return at


def _innermost(chains: Sequence[Sequence[Frame]], filter_: StackFilter) -> list[Frame]:
    """The innermost frame of each chain that is not left out; no frame twice."""
    found = (next((frame for frame in chain if not filter_.omits(frame[0])), chain[0]) for chain in chains if chain)
    return list(dict.fromkeys(found))


def _joined(chains: Sequence[Sequence[Frame]], filter_: StackFilter) -> list[Frame]:
    """Chains of several fused operators as one: innermost lines first, then what led there."""
    kept = [[frame for frame in chain if not filter_.omits(frame[0])] for chain in chains]
    first = dict.fromkeys(chain[0] for chain in kept if chain)
    rest = dict.fromkeys(frame for chain in kept for frame in chain[1:])
    return [*first, *(frame for frame in rest if frame not in first)]


def _text(frame: Frame) -> str:
    return f"{frame[0]}:{frame[1]}:{frame[2]}"


def provenance_now() -> Provenance:
    """What sees through generated modules, as it is now; shared while nothing changes."""
    provenance = Provenance(wrappers=known_wrappers(), line_maps=_line_maps())
    with PROCESS.lock:
        last = None if PROCESS.last_provenance is None else PROCESS.last_provenance()
        if last == provenance:
            return last
        PROCESS.last_provenance = weakref.ref(provenance)
    return provenance


def _line_maps() -> LineMap:
    """A shallow copy of Inductor's line maps; they don't survive ``torch._dynamo.reset``."""
    if "torch._inductor.codecache" not in sys.modules:
        return {}
    from graphcap_backend.inductor import line_maps

    return line_maps()
