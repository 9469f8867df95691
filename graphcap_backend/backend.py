"""The ``torch.compile`` backend: regions that Dynamo hands over, compiled by Inductor and captured.

A region holds its compiled subgraphs (forward, backward, partitions). Each is captured at Inductor's
cudagraph seam. Calls of an inference region of one subgraph go to that directly, past AOTAutograd's run-time
wrappers, once the first call has shown that those only pass its inputs and outputs on.
"""

from __future__ import annotations

import logging
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from graphcap_backend import inductor
from graphcap_backend.annotate.config import AnnotationConfig
from graphcap_backend.annotate.origins import register_wrapper
from graphcap_backend.annotate.stand_in_frame import calling_line
from graphcap_backend.capture.callee import Callee, ReplayLimits, Witness
from graphcap_backend.capture.outputs import picker
from graphcap_backend.capture.replay import Replayed
from graphcap_backend.capture.skip import SkipKind, SkipReason
from graphcap_backend.compiled_graphs import Subgraph, Unsafe, Wrapper
from graphcap_backend.errors import NotWarmedUpError, SkippedError
from graphcap_backend.options import GraphcapOptions, split_options
from graphcap_backend.report import log_capture

if TYPE_CHECKING:
    from graphcap_backend.annotate.origins import WrapperOrigins
    from graphcap_backend.capture.instance import Instance

logger = logging.getLogger("graphcap_backend")


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """One compiled subgraph of a region, or one partition of it, as captured or skipped."""

    name: str
    kind: str
    """"inference", "forward" or "backward"."""
    partition: int
    num_partitions: int
    replayed: Replayed | None
    skipped: SkipReason | None
    covers_whole_graph: bool = False


class Region:
    """One FX graph that Dynamo handed over, and what became of its subgraphs.

    Lives as long as Dynamo keeps the compiled code; ``Region.all_live`` only remembers it weakly.
    """

    all_live: ClassVar[weakref.WeakSet[Region]] = weakref.WeakSet()
    _numbers: ClassVar[count[int]] = count()

    def __init__(self, options: GraphcapOptions, owner: object | None) -> None:
        self.options = options
        self.host_capture = options.host_capture
        self.number = next(self._numbers)
        self.parts: list[Part] = []
        self._owner = weakref.ref(owner) if owner is not None else None
        self._origins: list[WrapperOrigins] = []
        self._said: set[tuple[SkipKind, str]] = set()
        self.entry: str | None = None
        """The user's line that the region is entered at, once it was."""
        self._compile_id = torch._guards.CompileContext.current_compile_id()
        self.all_live.add(self)

    @property
    def owner(self) -> object | None:
        """The torch.compile wrapper that this region was compiled for."""
        return self._owner() if self._owner is not None else None

    def captured(self, subgraph: Subgraph) -> Callable[[list[Any]], Sequence[Any]]:
        """Inductor hands over a subgraph that may be captured."""
        kind = _kind(subgraph.is_backward, subgraph.is_inference)
        region = weakref.ref(self)
        name = self._name(kind, subgraph.partition, subgraph.num_partitions)
        replayed = self._replayed(
            Callee(
                run=subgraph.run,
                name=name,
                device=subgraph.device,
                static=subgraph.static,
                mutated=subgraph.mutated,
                donated=subgraph.donated,
                constants=subgraph.constants,
                is_backward=subgraph.is_backward,
                may_share_outputs=subgraph.is_inference,
                sizes=subgraph.sizes,
                where=subgraph.where,
                entry=lambda: None if (alive := region()) is None else alive.entry,
            )
        )
        self.parts.append(
            Part(
                name=name,
                kind=kind,
                partition=subgraph.partition,
                num_partitions=subgraph.num_partitions,
                replayed=replayed,
                skipped=None,
                covers_whole_graph=subgraph.covers_whole_graph,
            )
        )
        return replayed

    def unsafe(self, graph: Unsafe) -> None:
        """Inductor says that a subgraph must not be captured, or it runs on the CPU."""
        kind = "backward" if graph.is_backward else "forward"
        if graph.on_cpu:
            reason = SkipReason(
                kind=SkipKind.CPU,
                detail="runs on the CPU, uncaptured",
                where=graph.where,
                advice='options={"host_capture": True} captures it into a HostGraph',
            )
        elif not graph.launches:
            reason = SkipReason(kind=SkipKind.NOTHING_TO_CAPTURE, detail="launches no kernel", where=graph.where)
        else:
            reason = SkipReason(kind=SkipKind.INDUCTOR, detail=_first_sentence(graph.reason), where=graph.where)
        name = self._name(kind, 0, 1)
        self.parts.append(Part(name=name, kind=kind, partition=0, num_partitions=1, replayed=None, skipped=reason))
        if reason.kind is not SkipKind.NOTHING_TO_CAPTURE:
            self.say(name, reason)

    def loaded(self, wrapper: Wrapper) -> None:
        """A generated module is in use: remember where its kernels come from."""
        self._origins.append(
            register_wrapper(
                path=wrapper.path,
                source_code=wrapper.source_code,
                stack_traces=wrapper.stack_traces,
                modules=wrapper.modules,
                annotations=wrapper.annotations,
            )
        )

    def say(self, name: str, reason: SkipReason) -> None:
        """Tell the user of something not captured: log it once, or raise.

        Raises:
            SkippedError: with ``on_skip="error"``, each time.
        """
        if self.options.on_skip == "error":
            raise SkippedError(f"{name} is not captured: {reason}")
        said = (reason.kind, name)
        if said in self._said or (reason.kind is SkipKind.CPU and self._sibling_said_cpu()):
            return
        self._said.add(said)
        if self.options.on_skip == "warn":
            logger.warning("%s is not captured: %s", name, reason)

    def _sibling_said_cpu(self) -> bool:
        return any(
            region.owner is self.owner and any(kind is SkipKind.CPU for kind, _ in region._said)
            for region in list(self.all_live)
        )

    def only_part(self) -> Replayed | None:
        """The region's single captured subgraph, if it does all of an inference and writes to no input."""
        if len(self.parts) != 1:
            return None
        (part,) = self.parts
        if part.kind != "inference" or not part.covers_whole_graph or part.replayed is None:
            return None
        return None if part.replayed.refused or part.replayed.callee.mutated else part.replayed

    def _replayed(self, callee: Callee) -> Replayed:
        options = self.options
        annotations = AnnotationConfig(record_py_stacks=True, best_effort=True) if options.record_stacks else None
        region = weakref.ref(self)

        def on_skip(reason: SkipReason) -> None:
            alive = region()
            if alive is not None:
                alive.say(callee.name, reason)

        def on_capture(instance: Instance) -> None:
            alive = region()
            if alive is not None:
                log_capture(alive, callee.name, instance.captured, alive._compile_id)

        return Replayed(
            callee,
            limits=ReplayLimits(
                max_graphs=options.max_graphs,
                max_held_instances=options.max_held_instances,
                capture_sizes=options.capture_sizes,
            ),
            annotations=annotations,
            on_skip=on_skip,
            on_capture=on_capture,
        )

    def _name(self, kind: str, partition: int, num_partitions: int) -> str:
        name = f"region {self.number} {kind}"
        return f"{name} partition {partition + 1} of {num_partitions}" if num_partitions > 1 else name


def graphcap(
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """The backend function behind ``torch.compile(model, backend="graphcap")``.

    Args:
        gm: graph that Dynamo traced.
        example_inputs: its inputs.
        mode: as for Inductor; its CUDA-graph settings change nothing here.
        options: fields of :class:`GraphcapOptions`, and Inductor's own configuration.

    Raises:
        ValueError: an option that neither graphcap nor Inductor knows.
        NotWarmedUpError: called inside a capture.
    """
    ours, for_inductor = split_options(options)
    patches = inductor.inductor_patches(mode, for_inductor)
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise NotWarmedUpError(
            "a function compiled with backend='graphcap' is called for the first time inside a capture, where it "
            "cannot be compiled. Call it once with such inputs before the capture."
        )
    region = Region(ours, _torch_compile_wrapper())
    try:
        compiled = inductor.compile_with_hooks(gm, example_inputs, region, patches)
    except SkippedError as error:
        return _raising(region, str(error))
    return _settling(region, compiled)


def _raising(region: Region, message: str) -> Callable[..., Any]:
    """In place of a compiled region that must not be skipped: raised while it compiles, Dynamo would wrap the error."""

    def call(*args: Any) -> Any:
        raise SkippedError(message)

    call.region = region  # type: ignore[attr-defined] # report() finds it as long as Dynamo keeps the callable
    return call


def _settling(region: Region, compiled: Callable[..., Any]) -> Callable[..., Any]:
    """The callable that Dynamo gets: the first call decides what serves the later ones."""
    serve: Callable[[list[Any]], Any] | None = None
    settled = False

    def call(*args: Any) -> Any:
        nonlocal serve, settled
        if serve is not None:
            return serve(list(args))
        if settled:
            return compiled(*args)
        if region.entry is None:
            region.entry = calling_line()
        only = region.only_part()
        if only is None:
            return compiled(*args)
        settled = True
        witness = only.runner.witness = Witness()
        try:
            outputs = compiled(*args)
        except BaseException:
            settled, only.runner.witness = False, None
            raise
        serve = _direct_way(only, args, outputs, witness)
        return outputs

    return call


def _direct_way(
    part: Replayed, args: Sequence[Any], outputs: Sequence[Any], witness: Witness
) -> Callable[[list[Any]], Any] | None:
    """A way to ``part`` past what lies between, if that passed on the very objects of the call; or None.

    What AOTAutograd's wrappers and the generated module's runner do is fixed when the graph is compiled:
    reorder or drop inputs and outputs, write to inputs, wrap subclasses, make outputs that are inputs or views
    of them. All but the first shows in an object that is not passed on as it is; none in one call means none
    in any.
    """
    given = _positions(witness.inputs, args)
    handed = _positions(outputs, witness.outputs)
    if given is None or handed is None:
        return None
    if given == list(range(len(args))) and handed == list(range(len(witness.outputs))):
        return part.__call__
    pick, hand = picker(given), picker(handed)
    return lambda args: hand(part(pick(args)))


def _positions(wanted: Sequence[Any], among: Sequence[Any]) -> list[int] | None:
    """Where each of ``wanted`` is among the others; None if one is not there or is there twice."""
    where: dict[int, list[int]] = {}
    for position, value in enumerate(among):
        where.setdefault(id(value), []).append(position)
    found = [where.get(id(value), []) for value in wanted]
    return [positions[0] for positions in found] if all(len(positions) == 1 for positions in found) else None


def _torch_compile_wrapper() -> object | None:
    """The object that stands for one ``torch.compile`` call, found up the stack; None without one."""
    frame = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self")
        if type(owner).__name__ == "_TorchCompileWrapper":
            return owner
        frame = frame.f_back  # type: ignore[assignment]
    return None


def _kind(is_backward: bool, is_inference: bool) -> str:
    return "backward" if is_backward else "inference" if is_inference else "forward"


def _first_sentence(reason: str) -> str:
    return reason.splitlines()[0].removeprefix("skipping cudagraphs due to ") if reason else "no reason given"
