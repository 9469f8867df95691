"""What became of a compiled function: captured, skipped, fell back, and why."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the package's __init__ loads this module, and must load no torch
    from graphcap_backend.backend import Part, Region
    from graphcap_backend.capture.family import Family
    from graphcap_backend.capture.record import CapturedGraph
    from graphcap_backend.capture.replay import Replayed
    from graphcap_backend.capture.skip import SkipReason
    from graphcap_backend.show.profile import Profile

logger = logging.getLogger("graphcap_backend")


@dataclass(frozen=True, kw_only=True, slots=True)
class PartReport:
    """One compiled subgraph of the function, or one partition of it."""

    name: str
    kind: str
    """"inference", "forward" or "backward"."""
    partition: int
    num_partitions: int
    state: str
    """"captured", "warm" (no key was met twice yet), "refused" (its inputs cannot be captured) or "skipped"."""
    reasons: tuple[SkipReason, ...]
    """Why the part, or single keys of it, are not captured."""
    where: str | None
    """A line of yours that it was compiled from, "file:line:function"; None where only torch's own are known."""
    num_keys: int
    """Shapes (and other properties of inputs) that are captured."""
    graphs: tuple[Any, ...]
    """Captured graph objects, oldest first; ``capture_nodes`` takes them. ``reset()`` gives up all of a shape."""
    num_nodes: int
    """Nodes of all its graphs together."""
    num_bytes: int
    """Bytes its graphs keep allocated: input buffers and outputs. Intermediates are shared by the pool."""
    num_replays: int
    fallbacks: dict[str, int]
    """Calls that ran uncaptured, by reason."""
    way: str | None
    """How nodes found their scopes and stacks: "cupti", "edge_walk", "host", or None when not recorded."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """What became of a compiled function; ``str()`` gives a table."""

    parts: tuple[PartReport, ...]

    @property
    def graphs(self) -> tuple[Any, ...]:
        """The captured graph objects, oldest first within each part."""
        return tuple(graph for part in self.parts for graph in part.graphs)

    def to_html(self, path: str | os.PathLike[str], profile: Profile | None = None) -> None:
        """Write all that is known of the graphs to one HTML page; see :func:`write_page`.

        Raises:
            ValueError: ``profile`` is not what :func:`profile_replays` gave.
            OSError: the file can't be written.
        """
        from graphcap_backend.show.page import write_page

        write_page(self, path, profile)

    def __str__(self) -> str:
        if not self.parts:
            return "graphcap: nothing compiled: not called yet, or Dynamo compiled none of it; fullgraph=True says why"
        return "\n".join(line for part in self.parts for line in _lines(part))


def report(compiled: Callable[..., Any]) -> Report:
    """Report on a function or module compiled with ``torch.compile(..., backend="graphcap")``.

    Raises:
        ValueError: ``compiled`` was not made by torch.compile with this backend.
    """
    from graphcap_backend.backend import Region, graphcap

    wrapper: Any = _compile_wrapper(compiled)
    live = [region for region in Region.all_live if region.owner is not None]
    regions = [region for region in live if region.owner is wrapper]
    if not regions and (wrapper is None or wrapper.compiler_fn is not graphcap):
        raise ValueError(
            f"report() takes what torch.compile(..., backend='graphcap') returned, found {type(compiled).__name__}"
        )
    if not regions:
        # Dynamo shares compiled code between torch.compile calls with equal settings.
        regions = [region for region in live if region.owner == wrapper]
    regions.sort(key=lambda region: region.number)
    return Report(parts=tuple(_report_part(region, part) for region in regions for part in region.parts))


def log_capture(region: Region, name: str, captured: CapturedGraph, compile_id: Any) -> None:
    """Log a new capture; with TORCH_TRACE set, node list and report become artifacts that tlparse shows."""
    from torch._logging._internal import trace_log, trace_structured_artifact

    from graphcap_backend.errors import GraphcapError

    logger.info("captured %s: %d nodes", name, captured.num_nodes)
    if not trace_log.handlers:
        return
    try:
        nodes = captured.nodes().render(stacks=True)
    except GraphcapError as error:  # a capture is good, also where its nodes can't be read
        nodes = f"(nodes cannot be read: {error})\n"
    rows = Report(parts=tuple(_report_part(region, part) for part in region.parts))
    trace_structured_artifact("graphcap_nodes", "string", lambda: f"{name}\n{nodes}", compile_id)
    trace_structured_artifact("graphcap_report", "string", lambda: f"{rows}\n", compile_id)


def _report_part(region: Region, part: Part) -> PartReport:
    replayed = part.replayed
    if replayed is None:
        assert part.skipped is not None
        return _row(part, "skipped", (part.skipped,), part.skipped.where)
    families = [family for family in replayed.families if family.instances]
    reasons = [family.refused for family in replayed.families if family.refused]
    if replayed.refused:
        reasons.append(replayed.refused)
    state = "captured" if families else "refused" if reasons else "warm"
    reasons += replayed.notices
    return _row(part, state, tuple(reasons), replayed.callee.where, replayed, families)


def _row(
    part: Part,
    state: str,
    reasons: tuple[SkipReason, ...],
    where: str | None,
    replayed: Replayed | None = None,
    families: list[Family] | None = None,
) -> PartReport:
    instances = [instance for family in families or [] for instance in family.instances]
    return PartReport(
        name=part.name,
        kind=part.kind,
        partition=part.partition,
        num_partitions=part.num_partitions,
        state=state,
        reasons=reasons,
        where=where,
        num_keys=len(families or []),
        graphs=tuple(instance.graph for instance in instances),
        num_nodes=sum(instance.captured.num_nodes for instance in instances),
        num_bytes=sum(instance.num_bytes for instance in instances),
        num_replays=replayed.num_replays if replayed else 0,
        fallbacks={kind.value: number for kind, number in sorted(replayed.fallbacks.items())} if replayed else {},
        way=next((instance.captured.way for instance in instances), None),
    )


def _lines(part: PartReport) -> Iterator[str]:
    yield (
        f"{part.name}: {part.state}, {part.num_keys} keys, {len(part.graphs)} graphs, {part.num_nodes} nodes, "
        f"{part.num_bytes} bytes, {part.num_replays} replays" + (f", recorded by {part.way}" if part.way else "")
    )
    if part.where and part.where not in [reason.where for reason in part.reasons]:
        yield f"  at {part.where}"
    if part.fallbacks:
        yield "  uncaptured calls: " + ", ".join(f"{number} {kind}" for kind, number in part.fallbacks.items())
    for reason in part.reasons:
        yield f"  not captured: {reason}"


def _compile_wrapper(compiled: Any) -> object | None:
    """The torch.compile wrapper behind a compiled function, or None."""
    compiled = getattr(compiled, "_compiled_call_impl", None) or compiled
    context = getattr(compiled, "dynamo_ctx", None)
    callback = getattr(context, "callback", None)
    if callback is None:
        code = getattr(compiled, "__code__", None)
        cells = dict(zip(code.co_freevars, compiled.__closure__ or (), strict=True)) if code is not None else {}
        callback = cells["callback"].cell_contents if "callback" in cells else None
    while callback is not None and type(callback).__name__ != "_TorchCompileWrapper":
        callback = getattr(callback, "_torchdynamo_orig_backend", None)
    found: object | None = callback
    return found
