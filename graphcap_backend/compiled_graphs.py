"""Compiled graphs as plain data, and the hooks that they are handed to.

``inductor.py`` fills these in when a graph is compiled or comes from a cache; who takes them need not know Inductor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from graphcap_backend.fx_traces import split_scope_frame


@dataclass(frozen=True, kw_only=True, slots=True)
class Subgraph:
    """What Inductor hands over: one compiled FX graph, or one partition of it."""

    run: Callable[[list[Any]], Sequence[Any]]
    device: torch.device
    static: tuple[int, ...]
    mutated: tuple[int, ...]
    donated: frozenset[int]
    """Inputs made by an earlier partition, which this one may overwrite."""
    constants: tuple[Tensor, ...]
    is_backward: bool
    is_inference: bool
    partition: int
    num_partitions: int
    covers_whole_graph: bool
    """Whether nothing of the FX graph runs outside this callable."""
    sizes: tuple[int, ...] | None
    """Which inputs are symbolic sizes by themselves, and not computed from such; None: all that are ints."""
    where: str | None
    """A line of the user's code that this subgraph came from, "file:line:function"."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Unsafe:
    """A compiled FX graph that Inductor says must not be captured, or that runs on no GPU."""

    reason: str
    on_cpu: bool
    launches: bool
    """False for work on tensors without elements: there is nothing to capture."""
    is_backward: bool
    where: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Wrapper:
    """A generated module and where its kernels come from, by provenance handle ("triton_poi_fused_gelu_0:2")."""

    path: str
    source_code: str
    stack_traces: Mapping[str, Sequence[str]]
    modules: Mapping[str, Sequence[str]]
    annotations: Mapping[str, Sequence[Mapping[str, Any]]]


class Hooks(Protocol):
    """What the backend does with compiled subgraphs."""

    host_capture: bool

    def captured(self, subgraph: Subgraph) -> Callable[[list[Any]], Sequence[Any]]:
        """The callable to use in place of ``subgraph.run``."""

    def unsafe(self, graph: Unsafe) -> None:
        """A graph stays as Inductor made it."""

    def loaded(self, wrapper: Wrapper) -> None:
        """A generated module is in use."""


def describe_wrapper(*, path: str, source_code: str, traces_by_handle: Mapping[str, Sequence[str]]) -> Wrapper:
    """The generated module whose kernel calls were made from FX nodes with these stack traces, as compiled."""
    traces: dict[str, list[str]] = {}
    modules: dict[str, list[str]] = {}
    scopes: dict[str, list[Mapping[str, Any]]] = {}
    for handle, tagged in traces_by_handle.items():
        for trace in tagged:
            origin, rest = split_scope_frame(trace)
            traces.setdefault(handle, []).append(rest)
            if "module" in origin and origin["module"] not in modules.setdefault(handle, []):
                modules[handle].append(origin["module"])
            if "scope" in origin and origin["scope"] not in scopes.setdefault(handle, []):
                scopes[handle].append(origin["scope"])
    return Wrapper(path=path, source_code=source_code, stack_traces=traces, modules=modules, annotations=scopes)
