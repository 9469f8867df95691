"""Labels of nodes inside child graphs and conditionals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.launch_log import recorded
from helpers.node_lists import chain, kernel

from graphcap_backend.annotate.process import PROCESS
from graphcap_backend.annotate.registry import get_kernel_annotations, get_kernel_py_stacks
from graphcap_backend.annotate.scopes import mark_kernels
from graphcap_backend.capture.nodes import Conditional, Node, NodeKind, NodeList
from graphcap_backend.capture.record import CapturedGraph


def child(index: int, body: NodeList, **labels: Any) -> Node:
    return Node(index=index, kind=NodeKind.CHILD_GRAPH, name="child_graph", body=body, **labels)


class SomeGraph:
    """What a captured graph is kept for."""


def test_they_have_those_of_the_node_they_lie_in(monkeypatch: pytest.MonkeyPatch) -> None:
    nested = child(1, chain("c"), dependencies=(0,))
    conditional = Node(
        index=2,
        kind=NodeKind.CONDITIONAL,
        name="conditional",
        conditional=Conditional(decides="if", body_sizes=(1,)),
        body=chain("d"),
    )
    template = NodeList([kernel(0, "a"), child(1, NodeList([kernel(0, "b"), nested])), conditional])
    with recorded() as run:
        torch.zeros(1)
        with mark_kernels("child"):
            torch.ones(1)
        with mark_kernels("conditional"):
            torch.ones(1)
    owner = SomeGraph()
    keys: Any = run.keys
    captured = CapturedGraph(owner, keys=keys, read_nodes=lambda: template, num_nodes=3, record=run.record)
    first, second, third = captured.nodes()
    assert first.annotation is None
    assert second.annotation == {"name": "child"}
    assert second.body is not None
    inner = second.body[1].body
    assert inner is not None
    assert third.body is not None
    for outer, inside in (
        (second, second.body[0]),
        (second, second.body[1]),
        (second, inner[0]),
        (third, third.body[0]),
    ):
        assert inside.annotation == outer.annotation
        assert inside.stack == outer.stack
        assert inside.stack is not None
        assert inside.sources == outer.sources != ()
    assert third.body[0].annotation == {"name": "conditional"}
    assert [node.name for node in second.body] == ["b", "child_graph"]  # and all else is as read

    # The views know the child's bodies by key, and the conditional's not at all.
    monkeypatch.setattr(PROCESS, "_warned", {"bodies without ids"})
    stacks = {key & 0xFFFF: text for key, text in get_kernel_py_stacks().items() if key >> 32 == 9}
    assert stacks == {0: first.stack, 3: second.stack, 5: second.stack}
    annotations = {key & 0xFFFF: value for key, value in get_kernel_annotations().items() if key >> 32 == 9}
    assert annotations == {3: [{"name": "child"}], 5: [{"name": "child"}]}


LABELS: dict[str, Any] = {
    "annotation": {"name": "block"},
    "stack": "/m/model.py:3:f",
    "sources": ("/m/model.py:3:f",),
    "modules": ("block",),
}


def test_text_says_them_once() -> None:
    inside = NodeList([kernel(0, "x", **LABELS), kernel(1, "y", **{**LABELS, "annotation": {"name": "own"}})])
    outer = child(0, NodeList([child(0, inside, **LABELS)]), **LABELS)
    assert NodeList([outer]).render(stacks=True, modules=True, shapes=False) == (
        "0 child_graph of 1 nodes\n"
        "    scope block\n"
        "    module block\n"
        "    source model.py:3:f\n"
        "    at model.py:3:f\n"
        "    0 child_graph of 2 nodes\n"
        "        0 kernel x\n"
        "        1 kernel y\n"
        "            scope own\n"
    )
    dot = NodeList([outer]).to_dot()
    assert dot.count('label="block"') == 1
    assert dot.count('label="own"') == 1


def test_a_scope_renamed_is_one_change() -> None:
    renamed = {**LABELS, "annotation": {"name": "other"}}
    before, after = (
        NodeList([child(0, NodeList([kernel(i, "x", **labels) for i in range(3)]), **labels)])
        for labels in (LABELS, renamed)
    )
    (change,) = before.diff(after).changes
    assert [str(field) for field in change.fields] == ["scope: block -> other"]
    assert change.body is None
