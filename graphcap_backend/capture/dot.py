"""Node lists as graphviz digraphs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count

from graphcap_backend.capture.bodies import shown_body
from graphcap_backend.capture.nodes import Node, NodeKind, NodeList
from graphcap_backend.capture.render import (
    INDENT,
    Detail,
    NodeText,
    one_line,
    params_text,
    scope_name,
    shape_text,
)

_SHAPES = {
    NodeKind.KERNEL: "box",
    NodeKind.MEMCPY: "cds",
    NodeKind.MEMSET: "cds",
    NodeKind.HOST: "octagon",
    NodeKind.CONDITIONAL: "diamond",
    NodeKind.CHILD_GRAPH: "folder",
}


def to_dot(nodes: NodeList, detail: Detail) -> str:
    """A digraph: an edge per dependency, a cluster per scope name and per body.

    A "/" in a scope's name nests clusters ("encoder/attention"). All nodes of one name share a
    cluster. Programmatic edges are dashed.
    """
    writer = _Writer(NodeText(detail))
    lines = ["digraph graphcap {", f"{INDENT}node [shape=ellipse];"]
    lines.extend(INDENT + line for line in writer.graph(nodes, "n"))
    lines.append("}")
    return "\n".join(lines) + "\n"


@dataclass(slots=True)
class _Scope:
    """Nodes directly in one scope, and the scopes inside it by name."""

    nodes: list[Node] = field(default_factory=list)
    inner: dict[str, _Scope] = field(default_factory=dict)


class _Writer:
    def __init__(self, text: NodeText) -> None:
        self._text = text
        self._numbers = count()

    def graph(self, nodes: NodeList, prefix: str) -> Iterator[str]:
        """Nodes and edges of one graph; ids are the prefix and the node's index."""
        root = _Scope()
        for node in nodes:
            scope = root
            for name in self._path(node):
                scope = scope.inner.setdefault(name, _Scope())
            scope.nodes.append(node)
        yield from self._scope(root, prefix)
        if self._text.detail.dependencies:
            yield from _edges(nodes, prefix)

    def _path(self, node: Node) -> list[str]:
        if not self._text.detail.annotations or not node.annotation:
            return []
        return [part for part in scope_name(node.annotation).split("/") if part]

    def _scope(self, scope: _Scope, prefix: str) -> Iterator[str]:
        for node in scope.nodes:
            yield from self._node(node, prefix)
        for name, inner in scope.inner.items():
            yield from self._cluster(name, "rounded", list(self._scope(inner, prefix)))

    def _node(self, node: Node, prefix: str) -> Iterator[str]:
        detail = self._text.detail
        label = [f"{node.index} {self._text.title(node)}"]
        if detail.shapes and (shape := shape_text(node)):
            label.append(shape)
        if detail.params and (params := params_text(node)):
            label.append(params)
        label.extend(self._text.sources(node))
        attributes = f"label={quoted(label)}"
        if outline := _SHAPES.get(node.kind):
            attributes += f", shape={outline}"
        yield f"{prefix}{node.index} [{attributes}];"
        if body := shown_body(node):
            inner = list(self.graph(body, f"{prefix}{node.index}_"))
            yield from self._cluster(f"body of {node.index}", "dashed", inner)
            first = f"{prefix}{node.index}_{body[0].index}"
            yield f"{prefix}{node.index} -> {first} [style=dotted, arrowhead=none];"

    def _cluster(self, label: str, style: str, inner: Sequence[str]) -> Iterator[str]:
        yield f"subgraph cluster_{next(self._numbers)} {{"
        yield f"{INDENT}label={quoted([label])};"
        yield f"{INDENT}style={style};"
        yield from (INDENT + line for line in inner)
        yield "}"


def _edges(nodes: NodeList, prefix: str) -> Iterator[str]:
    listed = {node.index for node in nodes}
    for node in nodes:
        for before in node.dependencies:
            if before in listed:
                early = before in node.programmatic_dependencies
                style = ' [style=dashed, label="programmatic"]' if early else ""
                yield f"{prefix}{before} -> {prefix}{node.index}{style};"


def quoted(lines: Sequence[str]) -> str:
    """A quoted graphviz string of ``lines``, one below the other, that reads as given."""
    escaped = (one_line(line).replace("\\", "\\\\").replace('"', '\\"') for line in lines)
    return '"' + "\\n".join(escaped) + '"'
