from __future__ import annotations

import time
from dataclasses import replace

from expecttest import assert_expected_inline
from helpers.node_lists import chain, kernel, layers
from hypothesis import given, settings
from hypothesis import strategies as st

from graphcap_backend.capture.nodes import Memcpy, Node, NodeKind, NodeList


def without(nodes: NodeList, index: int) -> NodeList:
    """``nodes`` without one, as a capture without it would be: a chain again."""
    kept = [node for node in nodes if node.index != index]
    return NodeList([replace(node, index=i, dependencies=(i - 1,) if i else ()) for i, node in enumerate(kept)])


def test_equal_lists() -> None:
    found = chain("a", "b").diff(chain("a", "b"))
    assert not found
    assert found.changes == ()
    assert str(found) == "no differences\n"


def test_one_removed_does_not_touch_the_others() -> None:
    nodes = layers(200)
    found = nodes.diff(without(nodes, 77))
    assert [change.before for change in found.removed] == [nodes[77]]
    assert not found.added
    assert not found.changed


def test_one_added_in_front() -> None:
    nodes = layers(50)
    found = without(nodes, 0).diff(nodes)
    assert [change.after for change in found.added] == [nodes[0]]
    assert len(found.changes) == 1


def test_which_of_many_equal_names_is_told_by_its_shape() -> None:
    nodes = NodeList([kernel(i, grid=(i + 1, 1, 1)) for i in range(9)])
    found = nodes.diff(without(nodes, 4))
    assert [change.before and change.before.grid for change in found.changes] == [(5, 1, 1)]


def test_text_says_what_of_a_node_changed() -> None:
    before = NodeList(
        [
            kernel(0, "triton_poi_fused_gelu_0", sources=("/a/m.py:3:f",), annotation={"name": "mlp"}),
            kernel(1, "gone"),
            kernel(2, "kept"),
            Node(
                index=3,
                kind=NodeKind.MEMCPY,
                name="memcpy",
                dependencies=(2,),
                memcpy=Memcpy(source="device", destination="host", num_bytes=64),
            ),
            kernel(4, "last", dependencies=(2, 3)),
        ]
    )
    after = NodeList(
        [
            kernel(0, "fresh", annotation={"name": "head"}, sources=("/b/m.py:2:f",)),
            kernel(1, "triton_poi_fused_gelu_5", sources=("/b/m.py:4:f",), grid=(16, 1, 1), cluster=(2, 1, 1)),
            kernel(2, "kept"),
            Node(
                index=3,
                kind=NodeKind.MEMCPY,
                name="memcpy",
                dependencies=(2,),
                memcpy=Memcpy(source="device", destination="device", num_bytes=64),
            ),
            kernel(4, "last", dependencies=(3,), programmatic_dependencies=(3,)),
        ]
    )
    assert_expected_inline(
        str(before.diff(after)),
        """\
1 added, 1 removed, 3 changed:
+ 0 kernel fresh; grid 8x1x1; block 128x1x1; shared 0 B; scope head; source m.py:2:f
~ 0 -> 1 kernel triton_poi_fused_gelu
    grid: 8x1x1 -> 16x1x1
    cluster: none -> 2x1x1
    scope: mlp -> none
    source: m.py:3:f -> m.py:4:f
- 1 kernel gone; grid 8x1x1; block 128x1x1; shared 0 B
~ 3 memcpy
    does: device to host, 64 B -> device to device, 64 B
~ 4 kernel last
    waits for: 2, 3 -> 3
    programmatic edge from: nothing -> 3
""",
    )


def test_a_changed_functor_is_a_change_and_another_kernel_is_not() -> None:
    add = "_ZN2at6native29vectorized_elementwise_kernelILi4ENS0_15CUDAFunctor_addIfEESt5arrayIPcLm3EEEEviT0_T1_"
    fill = "_ZN2at6native29vectorized_elementwise_kernelILi4ENS0_11FillFunctorIfEESt5arrayIPcLm1EEEEviT0_T1_"
    (change,) = chain("a", add).diff(chain("a", fill)).changed
    assert [field.field for field in change.fields] == ["name"]
    found = chain("a", "x", "b").diff(chain("a", "y", "b"))
    assert (len(found.removed), len(found.added), len(found.changed)) == (1, 1, 0)


def test_all_lines_moved_is_only_changes() -> None:
    before = layers(400)
    after = NodeList([replace(node, sources=("/m.py:999:forward",)) for node in without(before, 200)])
    found = before.diff(after)
    assert (len(found.removed), len(found.added), len(found.changed)) == (1, 0, 399)
    assert not before.diff(NodeList([replace(n, sources=("/x.py:1:f",)) for n in before]), sources=False)


def test_what_is_not_looked_at_does_not_differ() -> None:
    before = NodeList([kernel(0), kernel(1)])
    after = NodeList([kernel(0, grid=(9, 1, 1)), kernel(1, dependencies=(), annotation={"name": "x"})])
    assert before.diff(after)
    assert not before.diff(after, shapes=False, dependencies=False, annotations=False)


def test_an_added_edge() -> None:
    before = NodeList([kernel(0, "a"), kernel(1, "b", dependencies=()), kernel(2, "c", dependencies=(1,))])
    after = NodeList([kernel(0, "a"), kernel(1, "b", dependencies=()), kernel(2, "c", dependencies=(0, 1))])
    (change,) = before.diff(after).changed
    assert list(map(str, change.fields)) == ["waits for: 1 -> 0, 1"]


def test_an_edge_that_becomes_programmatic() -> None:
    before = chain("a", "b")
    after = NodeList([kernel(0, "a"), kernel(1, "b", programmatic_dependencies=(0,))])
    (change,) = before.diff(after).changed
    assert list(map(str, change.fields)) == ["programmatic edge from: nothing -> 0"]


def test_inside_child_graphs() -> None:
    def with_body(*names: str) -> NodeList:
        child = Node(index=1, kind=NodeKind.CHILD_GRAPH, name="child_graph", dependencies=(0,), body=chain(*names))
        return NodeList([kernel(0, "a"), child])

    found = with_body("x", "y", "z").diff(with_body("x", "z"))
    (change,) = found.changed
    assert change.body is not None
    assert [inner.text for inner in change.body.removed] == ["kernel y; grid 8x1x1; block 128x1x1; shared 0 B"]
    assert str(found) == ("1 changed:\n~ 1 child_graph\n    - 1 kernel y; grid 8x1x1; block 128x1x1; shared 0 B\n")


NAMES = st.lists(st.sampled_from("abc"), max_size=12)


@given(NAMES, NAMES)
@settings(deadline=None)
def test_false_exactly_when_the_texts_are_equal(a: list[str], b: list[str]) -> None:
    before, after = chain(*a), chain(*b)
    found = before.diff(after)
    assert bool(found) == (before.render() != after.render())
    assert len(before) - len(found.removed) + len(found.added) == len(after)


def test_ten_thousand_nodes_in_seconds() -> None:
    before = layers(10_000)
    after = without(without(before, 9000), 10)
    start = time.perf_counter()
    found = before.diff(after)
    assert time.perf_counter() - start < 5
    assert len(found.removed) == 2
    assert len(found.changes) == 2
