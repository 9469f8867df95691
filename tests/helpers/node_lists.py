"""Node lists made by hand, for tests of what reads them."""

from __future__ import annotations

from typing import Any

from graphcap_backend.capture.nodes import Node, NodeKind, NodeList


def kernel(index: int, name: str = "k", **fields: Any) -> Node:
    """A kernel that waits for the node before it unless told otherwise."""
    fields.setdefault("dependencies", (index - 1,) if index else ())
    fields.setdefault("grid", (8, 1, 1))
    fields.setdefault("block", (128, 1, 1))
    fields.setdefault("shared_mem_bytes", 0)
    return Node(index=index, kind=NodeKind.KERNEL, name=name, **fields)


def chain(*names: str) -> NodeList:
    """Kernels of these names, one after the other."""
    return NodeList([kernel(index, name) for index, name in enumerate(names)])


def layers(number_of_nodes: int) -> NodeList:
    """Something like a long training step: few names, repeated layer by layer."""
    names = (
        "_ZN2at6native29vectorized_elementwise_kernelILi4ENS0_15CUDAFunctor_addIfEESt5arrayIPcLm3EEEEviT0_T1_",
        "triton_poi_fused_gelu_0",
        "triton_red_fused_native_layer_norm_1",
        "nvjet_tst_64x8_64x16_4x1_v_bz_TNT",
    )
    return NodeList(
        [
            kernel(
                index,
                names[index % len(names)],
                grid=(index // 40 + 1, 1, 1),
                annotation={"name": f"layer.{index // 40}/block"},
                sources=(f"/home/me/model.py:{index % 200}:forward",),
            )
            for index in range(number_of_nodes)
        ]
    )
