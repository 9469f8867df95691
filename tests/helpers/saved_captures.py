"""Saved captures made by hand, for tests of what is shown of them."""

from __future__ import annotations

from collections.abc import Sequence

from helpers.node_lists import kernel

from graphcap_backend import NodeList, Profile, SavedCapture
from graphcap_backend.annotate.profile import Timing
from graphcap_backend.show.profile import NodeTime, OutsideTime
from graphcap_backend.show.saved import SavedGraph


def model_nodes() -> NodeList:
    """Three kernels: of one line, fused from two lines, of no line."""
    return NodeList(
        [
            kernel(
                0,
                "gemm",
                sources=("/m/model.py:10:forward",),
                modules=("up",),
                annotation={"name": "mlp"},
                stack="/m/model.py:10:forward\n/m/main.py:3:<module>",
            ),
            kernel(
                1,
                "triton_poi_fused_add_gelu_0",
                sources=("/m/model.py:11:forward", "/m/model.py:10:forward"),
                modules=("up", "down"),
                annotation={"name": "mlp", "fused": [{"name": "mlp"}, {"name": "residual"}]},
                stack="/m/model.py:11:forward\n/m/model.py:10:forward\n/m/main.py:3:<module>",
            ),
            kernel(2, "copy_kernel"),
        ]
    )


def saved(*graphs: NodeList, exec_ids: Sequence[int | None] = ()) -> SavedCapture:
    return SavedCapture(
        versions={"graphcap": "0"},
        graphs=tuple(
            SavedGraph(
                name=f"graph {number}",
                way="host",
                source_graph_id=number + 1,
                exec_graph_id=exec_ids[number] if exec_ids else None,
                nodes=nodes,
            )
            for number, nodes in enumerate(graphs)
        ),
        source_text={"/m/model.py": {10: "h = self.up(x)", 11: "return self.down(gelu(h)) + x"}},
    )


def profiled(nodes: NodeList, totals: Sequence[int], outside: int = 0) -> Profile:
    """A profile of two calls in which the nodes took ``totals`` nanoseconds."""
    capture = saved(nodes)
    times = [
        NodeTime(graph=0, path=(index,), node=nodes[index], labels=nodes[index], timing=_timing(total))
        for index, total in enumerate(totals)
    ]
    others = (OutsideTime(name="copy", timing=_timing(outside)),) if outside else ()
    return Profile(capture=capture, clock="cuda", num_calls=2, times=tuple(times), outside=others)


def _timing(total: int) -> Timing:
    return Timing(count=2, total_ns=total, min_ns=total // 3, max_ns=total - total // 3)
