"""Reading a long list of nodes back, and rendering it as text."""

from __future__ import annotations

import time
from typing import Any

import torch

from benchmarks.measure import garbage_collection_off
from benchmarks.rows import Row, Target, value_row
from benchmarks.settings import Settings
from graphcap_backend import capture_nodes, graph, mark_kernels

NUM_NODES = 10_000


def _captured(settings: Settings, x: torch.Tensor, num_nodes: int, config: dict[str, Any] | None) -> Any:
    graph_ = settings.new_graph()
    with graph(graph_, enable_annotations=config is not None, annotation_config=config):
        with mark_kernels("work"):
            for _ in range(num_nodes):
                x.add_(1)
    return graph_


def nodes(settings: Settings) -> list[Row]:
    """10,000 kernels: ``capture_nodes(g)`` the first time, and ``render()``; plain, and with scopes and stacks."""
    num_nodes = settings.scaled(NUM_NODES)
    x = torch.randn(64, device=settings.device)
    x.add_(1)
    rows = []
    for name, text, config in (
        ("nodes", "nothing recorded", None),
        ("nodes/recorded", "with scopes and stacks", {"record_py_stacks": True}),
    ):
        reads, renders = [], []
        for _ in range(2 if settings.quick else 5):
            graph_ = _captured(settings, x, num_nodes, config)
            settings.synchronize()
            with garbage_collection_off():
                start = time.perf_counter()
                found = capture_nodes(graph_)
                middle = time.perf_counter()
                rendered = found.render()
                end = time.perf_counter()
            if len(found) != num_nodes or not rendered:
                raise AssertionError(f"read {len(found)} of {num_nodes} nodes")
            reads.append(middle - start)
            renders.append(end - middle)
        what = f"a list of {num_nodes} nodes, {text}"
        rows.append(value_row(f"{name}/read", f"reading {what}", reads, unit="s", target=Target(bar=1.0)))
        rows.append(value_row(f"{name}/render", f"rendering {what}", renders, unit="s", target=Target(bar=2.0)))
    return rows


ROWS = {"nodes": nodes}
