"""How an executable graph numbers its nodes, bodies of child graphs included.

CUPTI reports replayed work with a node id of the executable graph. Nodes of the top level
keep the ids they were captured with; the bodies follow, one after another, each child
node's body before the bodies nested in it (measured, see DESIGN.md).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, Protocol

_SILENT: Final = frozenset({"empty", "child_graph", "conditional", "mem_alloc", "mem_free", "unknown"})
"""Kinds of nodes that a replay reports no work for under their own id."""


def does_work(kind: str) -> bool:
    """Whether a replay reports work under the id of a node of this kind."""
    return kind not in _SILENT


def lacks_source_id(kind: str) -> bool:
    """Whether CUPTI may report such a node by the executable graph's id only: host functions, and copies
    between devices, which are memcpy nodes like others."""
    return kind in ("host", "memcpy")


class ShapedNode(Protocol):
    """What is needed of a node."""

    @property
    def kind(self) -> str: ...
    @property
    def body(self) -> Sequence[ShapedNode] | None: ...


def exec_ids(nodes: Sequence[ShapedNode]) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Ids in the executable graph of all nodes that do work.

    Yields:
        The id, and the indices that lead to the node: its own at the top level, the child
        node's first for a node in a body.

    Bodies after a conditional's have no known ids and are left out.
    """
    for index, node in enumerate(nodes):
        if does_work(node.kind):
            yield index, (index,)
    yield from _bodies(nodes, (), [len(nodes)])


def without_ids(nodes: Sequence[ShapedNode]) -> Iterator[int]:
    """Indices of top-level nodes with work in their bodies that ``exec_ids`` leaves out."""
    known = {path for _, path in exec_ids(nodes)}
    for index, node in enumerate(nodes):
        if any(path not in known for path in _work_inside(node, (index,))):
            yield index


def _work_inside(node: ShapedNode, path: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    if node.kind == "conditional":
        yield path  # for its bodies, which not every driver lists
        return
    for index, inside in enumerate(node.body or ()):
        if does_work(inside.kind):
            yield (*path, index)
        yield from _work_inside(inside, (*path, index))


def _bodies(
    nodes: Sequence[ShapedNode], path: tuple[int, ...], next_id: list[int]
) -> Iterator[tuple[int, tuple[int, ...]]]:
    for index, node in enumerate(nodes):
        if node.kind == "conditional":
            next_id.clear()
        if not next_id:
            return
        if node.kind != "child_graph" or node.body is None:
            continue
        here = (*path, index)
        first = next_id[0]
        next_id[0] += len(node.body)
        for inner, inside in enumerate(node.body):
            if does_work(inside.kind):
                yield first + inner, (*here, inner)
        yield from _bodies(node.body, here, next_id)
