"""A compiled function that is dropped takes its graphs along."""

from __future__ import annotations

import gc
import weakref

import torch
from torch import Tensor

from graphcap_backend import get_kernel_py_stacks, report


def _captured_graphs() -> list[weakref.ref[object]]:
    compiled = torch.compile(lambda x: x.sin() + 1, backend="graphcap", options={"host_capture": True})
    results: list[Tensor] = [compiled(torch.randn(4)) for _ in range(4)]
    graphs = report(compiled).graphs
    assert len(results) == 4
    assert graphs
    return [weakref.ref(graph) for graph in graphs]


def test_reset_frees_graphs_though_nobody_asked_for_their_stacks() -> None:
    before = set(get_kernel_py_stacks())
    graphs = _captured_graphs()
    torch._dynamo.reset()
    gc.collect()
    assert [graph() for graph in graphs] == [None] * len(graphs)
    # Not "none at all": after a graph break Dynamo itself keeps the first part of a function that is gone.
    assert set(get_kernel_py_stacks()) <= before
