"""Capture ahead of time, for many shapes, with a progress bar."""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from graphcap_backend.capture.allocator import segments_of
from graphcap_backend.capture.skip import SkipKind
from graphcap_backend.report import Report, report
from graphcap_backend.show.saved import report_of

logger = logging.getLogger("graphcap_backend")

_FEWEST_CALLS = 3  # warm up, capture, and capture the instance that takes turns while an output is held
_MOST_CALLS = 12


@dataclass(frozen=True, kw_only=True, slots=True)
class Precaptured:
    """What became of one entry of the inputs."""

    shape: str
    seconds: float
    num_graphs: int
    """Graphs that were captured for it; 0 where it was captured before, or cannot be."""
    pool_bytes: int
    """Bytes that the memory pools of all graphs take, after this one. On the host, what the graphs keep."""


def precapture(
    compiled: Callable[..., Any], inputs: Sequence[Any], *, progress: bool | None = None
) -> tuple[Precaptured, ...]:
    """Call a compiled function until each of ``inputs`` is captured, so that no later call has to.

    Each entry is called three times, and then for as long as that captures another graph, results dropped but for
    the last: real calls, with all their side effects, in the gradient mode of the caller. Graphs that need much memory
    are dropped when a larger one comes, to be captured again in its memory; such entries are called again in the end,
    so that it is quickest to give large inputs first. An interrupt (or an error of the function) ends the run and
    leaves the function working, with what was captured so far. Warns when the function has no captured graph
    afterwards.

    Args:
        compiled: a function or module compiled with the graphcap backend.
        inputs: one entry per shape: a tuple of positional arguments, a dict of keyword arguments, or the only
            argument itself.
        progress: whether a progress bar is shown. By default where there is a terminal.

    Raises:
        ValueError: ``compiled`` was not compiled with this backend.
        TypeError: ``inputs`` is no list.
        Exception: whatever a call raises.
    """
    from tqdm import tqdm

    report_of(compiled, "precapture(compiled, inputs)")  # ValueError before any call
    _check_inputs(inputs)
    done: list[_Entry] = []
    bar = tqdm(inputs, desc="capturing", unit="shape", disable=None if progress is None else not progress)
    with bar:
        for arguments in bar:
            entry = _Entry(arguments, _shape(arguments))
            bar.set_postfix_str(entry.shape)
            entry.capture(compiled)
            bar.set_postfix_str(f"{entry.shape}: {entry.seconds:.2f} s, pool {_bytes(entry.pool_bytes)}")
            logger.info("captured %s: %d graphs, %.2f s, pool %s", entry.shape, len(entry.graphs), entry.seconds,
                        _bytes(entry.pool_bytes))  # fmt: skip
            done.append(entry)
    for entry in done:
        found = report(compiled)
        if _without(entry.graphs, found.graphs) and not _has_too_many(found):
            entry.capture(compiled)
    if done and not (found := report(compiled)).graphs:
        warnings.warn(f"precapture captured no graph; the report says why:\n{found}", stacklevel=2)
    return tuple(
        Precaptured(shape=entry.shape, seconds=entry.seconds, num_graphs=len(entry.graphs), pool_bytes=entry.pool_bytes)
        for entry in done
    )


def _check_inputs(inputs: object) -> None:
    from torch import Tensor

    # A tensor or a text has rows or letters, and a dict has keys: none is an input of its own.
    if isinstance(inputs, (Tensor, str, Mapping)) or not isinstance(inputs, Iterable):
        raise TypeError(
            "inputs must be a list of inputs, each a tuple of positional arguments, a dict of keyword arguments or the "
            f"only argument itself, found {type(inputs).__name__}; for one input pass [x]"
        )


class _Entry:
    """One of the inputs, and the graphs that it has by now."""

    def __init__(self, arguments: Any, shape: str) -> None:
        self.shape = shape
        self.seconds = 0.0
        self.graphs: tuple[Any, ...] = ()
        self.pool_bytes = 0
        self._arguments = arguments

    def capture(self, compiled: Callable[..., Any]) -> None:
        """Call the function until that captures no more."""
        start = time.perf_counter()
        result, others = None, report(compiled).graphs
        seen = list(others)  # held, so that no new graph has the id of one that is gone
        for number in range(1, _MOST_CALLS + 1):
            # The result of the call before is held meanwhile, as loops do.
            result = _call(compiled, self._arguments)
            found = report(compiled)
            new = _without(found.graphs, seen)
            seen += new
            if number >= _FEWEST_CALLS and not new:
                break
        del result
        self.seconds += time.perf_counter() - start
        before = _without(others, self.graphs)
        self.graphs = tuple(_without(found.graphs, before))
        self.pool_bytes = _pool_bytes(found)


def _has_too_many(found: Report) -> bool:
    """Whether graphs make room for others: one that is captured again would drop another."""
    return any(reason.kind is SkipKind.TOO_MANY_SHAPES for part in found.parts for reason in part.reasons)


def _without(graphs: Iterable[Any], others: Iterable[Any]) -> list[Any]:
    left_out = set(map(id, others))
    return [graph for graph in graphs if id(graph) not in left_out]


def _call(compiled: Callable[..., Any], arguments: Any) -> Any:
    return compiled(**arguments) if isinstance(arguments, dict) else compiled(*_arguments(arguments))


def _arguments(entry: Any) -> tuple[Any, ...]:
    return entry if isinstance(entry, tuple) else (entry,)


def _shape(entry: Any) -> str:
    from torch import Tensor

    values = entry.values() if isinstance(entry, dict) else _arguments(entry)
    shapes = ["x".join(map(str, value.shape)) or "scalar" for value in values if isinstance(value, Tensor)]
    return ", ".join(shapes) or "no tensor"


def _pool_bytes(found: Report) -> int:
    import torch

    pools = [graph.pool() for graph in found.graphs if isinstance(graph, torch.cuda.CUDAGraph)]
    if not pools:
        return sum(part.num_bytes for part in found.parts)
    segments = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
    return sum(segment["total_size"] for segment in segments_of(segments, *pools))


def _bytes(number: int) -> str:
    return f"{number / 2**20:.1f} MiB"
