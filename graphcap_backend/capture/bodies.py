"""Labels of nodes in the bodies of child graphs and conditionals.

A body was put into the capture as a whole, by the call that made the child graph or conditional node: what is
known of that call (scope, stack, sources, modules) holds for every node inside.
"""

from __future__ import annotations

import dataclasses

from graphcap_backend.capture.nodes import Node, NodeList


def labelled(body: NodeList | None, outer: Node) -> NodeList | None:
    """``body`` with the labels of ``outer``, the node it lies in, on all its nodes."""
    if body is None:
        return None
    return NodeList(
        [
            dataclasses.replace(
                node,
                annotation=outer.annotation,
                stack=outer.stack,
                sources=outer.sources,
                modules=outer.modules,
                body=labelled(node.body, outer),
            )
            for node in body
        ]
    )


def shown_body(node: Node) -> NodeList | None:
    """The body of ``node`` as text shows it: without labels that only repeat those of ``node``."""
    if node.body is None:
        return None
    return NodeList([_without_repeats(inside, node) for inside in node.body])


def _without_repeats(node: Node, outer: Node) -> Node:
    return dataclasses.replace(
        node,
        annotation=None if node.annotation == outer.annotation else node.annotation,
        stack=None if node.stack == outer.stack else node.stack,
        sources=() if node.sources == outer.sources else node.sources,
        modules=() if node.modules == outer.modules else node.modules,
        body=shown_body(node),
    )
