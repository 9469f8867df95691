"""Where the microseconds of a one-kernel call go. Host time, each step alone, the device idle before it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from benchmarks import models
from benchmarks.measure import alternate, dropping, holding, host_dropping
from benchmarks.rows import Row, value_row
from benchmarks.settings import Settings

if TYPE_CHECKING:
    from graphcap_backend.capture.instance import Instance

CALL = "whole call"
FLOOR = "Dynamo alone"
BACKEND = "our callable alone"
COPY = "input copy by a launch"
SOURCE = "source of the input's copy node set"
REPLAY = "graph.replay()"
DETACH = "detach()"
COUNT = "storage use count"
NOTHING = "an empty function"


class _Kept:
    """A backend that keeps the callable it gives to Dynamo."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.options = options
        self.callables: list[Callable[..., Any]] = []

    def __call__(self, gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        from graphcap_backend.backend import graphcap

        compiled = graphcap(gm, inputs, options=self.options)
        self.callables.append(compiled)
        return compiled


def _constant_backend(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    outputs = gm(*inputs)
    return lambda *args: outputs


def _storage_use_count(tensor: Tensor) -> Callable[[], object]:
    return partial(torch._C._storage_Use_Count, tensor.untyped_storage()._cdata)


def _instances() -> Iterator[Instance]:
    from graphcap_backend.backend import Region

    parts = (part.replayed for region in Region.all_live for part in region.parts)
    return (instance for part in parts if part for family in part.families for instance in family.instances)


def _steps(settings: Settings) -> dict[str, Callable[[], object]]:
    from graphcap_backend import report

    x = torch.randn(8, device=settings.device)
    kept = _Kept({} if settings.on_cuda else {"host_capture": True})
    ours: Any = torch.compile(models.fresh(models.add_one), backend=kept)
    floor: Any = torch.compile(models.fresh(models.add_one), backend=_constant_backend)
    for compiled in (ours, floor):
        dropping(partial(compiled, x))(8)
        holding(partial(compiled, x))(8)
    models.assert_close(ours(x), x + 1, "graphcap")
    buffer, graph = torch.empty_like(x), report(ours).graphs[0]
    (copies,) = (instance.input_copies for instance in _instances() if instance.graph is graph)
    # Names are bound as a tuned caller would: what is timed is the step, not finding it.
    return {
        CALL: partial(ours, x),
        FLOOR: partial(floor, x),
        BACKEND: partial(kept.callables[0], x),
        COPY: partial(buffer.copy_, x),
        **({SOURCE: partial(copies[0].read_from, x)} if copies else {}),
        REPLAY: partial(type(graph).replay, graph),
        DETACH: buffer.detach,
        COUNT: _storage_use_count(buffer),
        NOTHING: lambda: None,
    }


@torch.no_grad()
def breakdown(settings: Settings) -> list[Row]:
    """The whole call, Dynamo alone, our callable alone, and the steps that ours is made of."""
    steps = _steps(settings)
    sync = settings.synchronize
    samples = alternate(
        {name: partial(host_dropping, step, sync, 50) for name, step in steps.items()},
        rounds=settings.rounds,
        seconds=settings.seconds,
    )
    known = (REPLAY, DETACH, COUNT)
    rest = [
        ours - sum(parts) for ours, *parts in zip(samples[BACKEND], *(samples[name] for name in known), strict=True)
    ]
    under_dynamo = [
        whole - floor - ours for whole, floor, ours in zip(samples[CALL], samples[FLOOR], samples[BACKEND], strict=True)
    ]
    sides = {
        **samples,
        "our callable less replay, detach, count": rest,
        # With Dynamo's frame evaluation on, Python calls Python by a slower way.
        "whole call less Dynamo alone and our callable": under_dynamo,
    }
    return [
        value_row(
            "breakdown",
            "steps of a one-kernel call, each timed alone",
            samples[CALL],
            unit="us",
            sides=sides,
            note=f"each step includes about {min(samples[NOTHING]):.2f} us of timing",
        )
    ]


ROWS = {"breakdown": breakdown}
