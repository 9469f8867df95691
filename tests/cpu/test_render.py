from __future__ import annotations

import time

import pytest
from expecttest import assert_expected_inline
from helpers.node_lists import chain, kernel, layers

from graphcap_backend.capture.nodes import Conditional, Memcpy, Memset, Node, NodeKind, NodeList
from graphcap_backend.capture.render import Detail


def every_kind() -> NodeList:
    def node(index: int, kind: NodeKind, **fields: object) -> Node:
        fields.setdefault("dependencies", (index - 1,) if index else ())
        return Node(index=index, kind=kind, name=kind.value, **fields)  # type: ignore[arg-type]

    return NodeList(
        [
            kernel(
                0,
                "triton_poi_fused_gelu_0",
                cluster=(2, 1, 1),
                shared_mem_bytes=64,
                annotation={"name": "mlp", "phase": "forward", "stream": 63},
                sources=("/home/me/model.py:12:forward", "/home/me/model.py:13:forward"),
                stack="/home/me/model.py:12:forward\n/home/me/run.py:4:<module>",
                modules=("blocks.0.mlp",),
            ),
            node(1, NodeKind.MEMCPY, memcpy=Memcpy(source="device", destination="host", num_bytes=1024)),
            node(2, NodeKind.MEMSET, memset=Memset(value=7, element_bytes=1, num_bytes=16), dependencies=(0,)),
            node(3, NodeKind.HOST, dependencies=()),
            node(4, NodeKind.EVENT_RECORD, dependencies=(1, 2, 3)),
            node(5, NodeKind.EVENT_WAIT),
            node(6, NodeKind.BATCH_MEM_OP, mem_ops=("wait_value_32", "write_value_32")),
            node(7, NodeKind.CHILD_GRAPH, body=NodeList([kernel(0, "inner_a"), kernel(1, "inner_b")])),
            kernel(8, "dependent", dependencies=(6, 7), programmatic_dependencies=(7,)),
            kernel(9, "chained", programmatic_dependencies=(8,)),
            node(10, NodeKind.MEM_ALLOC, alloc_bytes=4096),
            node(11, NodeKind.MEM_FREE),
            node(
                12,
                NodeKind.CONDITIONAL,
                conditional=Conditional(decides="if", body_sizes=(1, 1)),
                body=NodeList([kernel(0, "then"), kernel(1, "otherwise", dependencies=())]),
            ),
            node(13, NodeKind.EMPTY),
        ]
    )


def test_every_kind() -> None:
    assert_expected_inline(
        every_kind().render(),
        """\
0 kernel triton_poi_fused_gelu [grid 8x1x1, block 128x1x1, cluster 2x1x1, shared 64 B]
    scope mlp, phase='forward', stream=0
    source model.py:12:forward
    source model.py:13:forward
1 memcpy device to host, 1024 B
2 memset 16 B with 0x7 (1 B each) after 0
3 host after nothing
4 event_record after 1, 2, 3
5 event_wait
6 batch_mem_op wait_value_32, write_value_32
7 child_graph of 2 nodes
    0 kernel inner_a [grid 8x1x1, block 128x1x1, shared 0 B]
    1 kernel inner_b [grid 8x1x1, block 128x1x1, shared 0 B]
8 kernel dependent [grid 8x1x1, block 128x1x1, shared 0 B] after 6, 7 (programmatic)
9 kernel chained [grid 8x1x1, block 128x1x1, shared 0 B] after 8 (programmatic)
10 mem_alloc 4096 B
11 mem_free
12 conditional if
    body 0:
        0 kernel then [grid 8x1x1, block 128x1x1, shared 0 B]
    body 1:
        1 kernel otherwise [grid 8x1x1, block 128x1x1, shared 0 B]
13 empty
""",
    )


def test_everything_that_can_be_shown() -> None:
    assert_expected_inline(
        every_kind()[:1].render(stacks=True, modules=True),
        """\
0 kernel triton_poi_fused_gelu [grid 8x1x1, block 128x1x1, cluster 2x1x1, shared 64 B]
    scope mlp, phase='forward', stream=0
    module blocks.0.mlp
    source model.py:12:forward
    source model.py:13:forward
    at model.py:12:forward
    at run.py:4:<module>
""",
    )


def test_as_little_as_possible() -> None:
    text = every_kind().render(shapes=False, params=False, annotations=False, sources=False, dependencies=False)
    assert_expected_inline(
        text,
        """\
0 kernel triton_poi_fused_gelu
1 memcpy
2 memset
3 host
4 event_record
5 event_wait
6 batch_mem_op
7 child_graph
    0 kernel inner_a
    1 kernel inner_b
8 kernel dependent
9 kernel chained
10 mem_alloc
11 mem_free
12 conditional
    body 0:
        0 kernel then
    body 1:
        1 kernel otherwise
13 empty
""",
    )


def test_no_nodes() -> None:
    assert NodeList([]).render() == "(no nodes)\n"


def test_a_slice_keeps_its_indices() -> None:
    assert chain("a", "b", "c")[1:].render(shapes=False) == "1 kernel b after 0\n2 kernel c\n"


def test_two_numberings_of_the_same_kernels_read_alike() -> None:
    once = chain("triton_poi_fused_gelu_0", "triton_poi_fused_gelu_0", "triton_poi_fused_add_1")
    again = chain("triton_poi_fused_gelu_4", "triton_poi_fused_gelu_4", "triton_poi_fused_add_7")
    assert once.render() == again.render()


def test_the_directory_does_not_show() -> None:
    here = NodeList([kernel(0, sources=("/home/me/src/model.py:3:f",), stack="/home/me/src/model.py:3:f")])
    there = NodeList([kernel(0, sources=("/ci/42/src/model.py:3:f",), stack="/ci/42/src/model.py:3:f")])
    assert here.render(stacks=True) == there.render(stacks=True)
    assert here.render(stacks=True, relative_to="/home/me") == there.render(stacks=True, relative_to="/ci/42")
    assert "source src/model.py:3:f\n" in here.render(relative_to="/home/me")
    assert "source model.py:3:f\n" in here.render(relative_to="/home/m")


@pytest.mark.parametrize(
    ("frame", "shown"),
    [
        ("model.py:3:f", "model.py:3:f"),
        ("<ipython-input-3-0123abcd>:1:<module>", "<ipython-input>:1:<module>"),
        ("/tmp/ipykernel_4711/3054.py:2:g", "<ipython-input>:2:g"),
        ("<string>:1:<module>", "<string>:1:<module>"),
        (f"/tmp/torchinductor_me/ab/c{'a2' * 25}.py:40:call", "<generated>.py:40:call"),
        ("<eval_with_key>.17:5:forward", "<eval_with_key>:5:forward"),
        ("model.py:9:torch_dynamo_resume_in_forward_at_8", "model.py:9:torch_dynamo_resume_in_forward_at"),
        ("/a/b.zip/pkg/mod.py:7:h", "mod.py:7:h"),
        ("C:odd:5:name", "C:odd:5:name"),
        ("no colon", "no colon"),
        ("a\nb.py:1:f", "a\\nb.py:1:f"),
    ],
)
def test_frames(frame: str, shown: str) -> None:
    text = NodeList([kernel(0, sources=(frame,))]).render(shapes=False)
    assert text == f"0 kernel k\n    source {shown}\n"


def test_without_line_numbers() -> None:
    text = NodeList([kernel(0, sources=("/m.py:3:f",))]).render(shapes=False, line_numbers=False)
    assert text == "0 kernel k\n    source m.py:f\n"


def test_annotations_read_the_same_in_every_process() -> None:
    class Thing:
        pass

    def scope(annotation: dict[str, object]) -> str:
        return NodeList([kernel(0, annotation=annotation)]).render(shapes=False).splitlines()[1].strip()

    assert scope({"b": 1, "name": "x", "a": "t"}) == "scope x, a='t', b=1"
    assert scope({"tags": {"q", "p"}, "d": {"z": 1, "y": [(2,)]}}) == "scope d={y: [[2]], z: 1}, tags={'p', 'q'}"
    assert "0x" not in scope({"thing": Thing()})
    assert scope({"name": "two\nlines"}) == "scope two\\nlines"
    assert scope({"name": ["a", "b"]}) == "scope a + b"
    fused = {"name": "a", "stream": 61, "fused": [{"name": "a", "stream": 61}, {"name": "b", "k": 1}]}
    assert scope(fused) == "scope a, fused from (a, stream=0) and (b, k=1), stream=0"


def test_stream_lanes_are_numbered_within_the_list() -> None:
    def lanes(*numbers: int) -> str:
        return NodeList([kernel(i, annotation={"stream": n}) for i, n in enumerate(numbers)]).render()

    assert lanes(60, 61, 60) == lanes(73, 72, 73)
    assert lanes(60, 61, 60) != lanes(60, 61, 61)


def test_an_unknown_option_is_named() -> None:
    with pytest.raises(TypeError, match=r"unknown option 'stack'; the options are shapes, params, .*stacks"):
        chain("a").render(stack=True)


def test_a_detail_object_and_options_go_together() -> None:
    assert chain("a").render(Detail(shapes=False), sources=False) == "0 kernel a\n"


def test_ten_thousand_nodes_in_two_seconds() -> None:
    nodes = layers(10_000)
    start = time.perf_counter()
    text = nodes.render(stacks=True)
    seconds = time.perf_counter() - start
    assert text.count("\n") == 30_000
    assert seconds < 2
