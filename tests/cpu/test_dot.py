from __future__ import annotations

import re
import shutil
import subprocess

import pytest
from expecttest import assert_expected_inline
from helpers.node_lists import chain, kernel, layers

from graphcap_backend.capture.nodes import Node, NodeKind, NodeList

ODD = ('say "hi"', "back\\slash\\", "a<b>{c|d}", "line\nbreak", "naïve 図", "\\n", "end\\", "]; } x -> y")


def check_syntax(text: str) -> None:
    """That graphviz reads ``text``; without graphviz, that quotes and braces are balanced."""
    if dot := shutil.which("dot"):
        done = subprocess.run([dot, "-Tcanon"], input=text.encode(), capture_output=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr.decode()
        assert done.stderr == b""
    bare = re.sub(r'"(?:[^"\\\n]|\\.)*"', '""', text)
    assert bare.count("{") == bare.count("}")
    assert set(re.findall(r"[^\w\s{}\[\]=;,>-]", bare)) <= {'"'}


def nested() -> NodeList:
    child = Node(index=3, kind=NodeKind.CHILD_GRAPH, name="child_graph", dependencies=(1, 2), body=chain("x", "y"))
    return NodeList(
        [
            kernel(0, "triton_poi_fused_gelu_0", annotation={"name": "encoder/mlp"}, sources=("/a/m.py:3:f",)),
            kernel(1, "b", annotation={"name": "encoder"}),
            kernel(2, "c", dependencies=(0,), programmatic_dependencies=(0,), annotation={"name": "encoder/mlp"}),
            child,
        ]
    )


def test_scopes_nest_as_clusters() -> None:
    text = nested().to_dot()
    check_syntax(text)
    assert_expected_inline(
        text,
        """\
digraph graphcap {
    node [shape=ellipse];
    n3 [label="3 child_graph\\nof 2 nodes", shape=folder];
    subgraph cluster_0 {
        label="body of 3";
        style=dashed;
        n3_0 [label="0 kernel x\\ngrid 8x1x1, block 128x1x1, shared 0 B", shape=box];
        n3_1 [label="1 kernel y\\ngrid 8x1x1, block 128x1x1, shared 0 B", shape=box];
        n3_0 -> n3_1;
    }
    n3 -> n3_0 [style=dotted, arrowhead=none];
    subgraph cluster_2 {
        label="encoder";
        style=rounded;
        n1 [label="1 kernel b\\ngrid 8x1x1, block 128x1x1, shared 0 B", shape=box];
        subgraph cluster_1 {
            label="mlp";
            style=rounded;
            n0 [label="0 kernel triton_poi_fused_gelu\\ngrid 8x1x1, block 128x1x1, shared 0 B\\nm.py:3:f", shape=box];
            n2 [label="2 kernel c\\ngrid 8x1x1, block 128x1x1, shared 0 B", shape=box];
        }
    }
    n0 -> n1;
    n0 -> n2 [style=dashed, label="programmatic"];
    n1 -> n3;
    n2 -> n3;
}
""",
    )


@pytest.mark.parametrize("name", ODD)
def test_any_name_is_quoted(name: str) -> None:
    text = NodeList([kernel(0, name, annotation={"name": name}, sources=(f"{name}:1:{name}",))]).to_dot()
    check_syntax(text)


@pytest.mark.skipif(shutil.which("dot") is None, reason="needs graphviz's dot")
def test_graphviz_shows_a_name_as_it_is() -> None:
    svg = subprocess.run(
        ["dot", "-Tsvg"],
        input=NodeList([kernel(0, 'a "b" \\n c')]).to_dot(shapes=False).encode(),
        capture_output=True,
        timeout=60,
        check=True,
    )
    assert b"0 kernel a &quot;b&quot; \\n c" in svg.stdout.replace(b"&#45;", b"-")


def test_edges_to_nodes_outside_a_slice_are_left_out() -> None:
    text = nested()[1:].to_dot()
    check_syntax(text)
    assert "n0" not in text


def test_a_long_list() -> None:
    check_syntax(layers(1000).to_dot())
