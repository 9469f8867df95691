"""Captures with all that a page can show, for tests of the page."""

from __future__ import annotations

from dataclasses import replace

from helpers.node_lists import kernel, layers
from helpers.saved_captures import profiled, saved

from graphcap_backend import Node, NodeKind, NodeList, SavedCapture, SkipKind, SkipReason
from graphcap_backend.capture.nodes import Memcpy
from graphcap_backend.show.saved import SavedPart

EVIL = "</script><script>window.broken = 1</script><!-- & \u2028 ' \" <b>"


def ten_nodes() -> NodeList:
    """A fork and a join, a copy, a child graph, a name that is markup."""
    up, down = "/m/model.py:10:forward", "/m/model.py:11:forward"
    body = NodeList([kernel(0, "inner_a"), kernel(1, "inner_b")])
    return NodeList(
        [
            Node(index=0, kind=NodeKind.MEMCPY, name="memcpy",
                 memcpy=Memcpy(source="host", destination="device", num_bytes=4096)),
            kernel(1, "gemm", sources=(up,), stack=f"{up}\n/m/main.py:3:<module>", annotation={"name": "mlp"}),
            kernel(2, "triton_poi_fused_add_gelu_0", dependencies=(1,), sources=(up, down), modules=("up", "down")),
            kernel(3, "left", dependencies=(2,), sources=(down,)),
            kernel(4, "right", dependencies=(2,), sources=(down,)),
            kernel(5, "join", dependencies=(3, 4), sources=(down,)),
            Node(index=6, kind=NodeKind.CHILD_GRAPH, name="child", dependencies=(5,), body=body),
            kernel(7, EVIL, dependencies=(6,), sources=(f"/m/{EVIL}.py:1:{EVIL}",),
                   annotation={"name": EVIL, "k": [EVIL]}),
            kernel(8, "late", dependencies=(1, 7)),
            kernel(9, "alone", dependencies=()),
        ]
    )  # fmt: skip


def ten_node_capture() -> SavedCapture:
    """With a report in which one part was skipped and one refused in part, and with times but for two nodes."""
    profile = profiled(ten_nodes(), [800, 9000, 3001, 500, 600, 700, 0, 70, 80, 90], outside=1234)
    reason = SkipReason(kind=SkipKind.INDUCTOR, detail="skipping cudagraphs due to <cpu> & device",
                        where="/m/model.py:12:forward", advice="Move it to the device")  # fmt: skip
    part = SavedPart(name="region 0 inference", kind="inference", partition=0, num_partitions=1, state="captured",
                     reasons=(), where="/m/model.py:10:forward", num_keys=1, graphs=(0,), num_nodes=10, num_bytes=4096,
                     num_replays=7, fallbacks={"warm_up": 1}, way="cupti")  # fmt: skip
    skipped = replace(part, name=f"region 1 {EVIL}", state="skipped", reasons=(reason,), graphs=(), num_keys=0,
                      num_nodes=0, num_replays=0, fallbacks={}, way=None)  # fmt: skip
    return replace(profile.capture, parts=(part, skipped), profile=profile)


def many_nodes(number: int) -> SavedCapture:
    """A long training step, with times."""
    nodes = layers(number)
    profile = profiled(nodes, [1000 + 37 * (index % 91) for index in range(number)])
    return replace(profile.capture, profile=profile)


def two_graphs() -> SavedCapture:
    """Two graphs, nothing timed."""
    return saved(ten_nodes(), layers(50))
