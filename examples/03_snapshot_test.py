"""Pin what a function captures as a text, and see what a change did to it.

The concept: ``NodeList.render()`` holds no address, id or path, so the text of a capture can be
compared in a test, on a machine without a GPU too. ``expecttest`` keeps the text in the test itself
and rewrites it when run with EXPECTTEST_ACCEPT=1; ``diff`` says which nodes came, went or changed.

Needs ``pip install expecttest``, which graphcap itself does not.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from expecttest import assert_expected_inline
from torch import Tensor

from graphcap_backend import HostGraph, NodeList, capture_nodes, graph


def normalize(x: Tensor) -> Tensor:
    return (x - x.mean()) / x.std()


def normalize_in_place(x: Tensor) -> Tensor:
    return (x - x.mean()).div_(x.std())


def nodes_of(function: Callable[[Tensor], Tensor]) -> NodeList:
    x = torch.randn(4, 8)
    g = HostGraph()
    with graph(g):
        function(x)
    return capture_nodes(g)


def main() -> None:
    before = nodes_of(normalize)
    print(before.render())
    assert_expected_inline(
        before.render(),
        """\
0 kernel aten.mean.default
1 kernel aten.sub.Tensor
2 kernel aten.std.correction
3 kernel aten.div.Tensor
""",
    )

    difference = before.diff(nodes_of(normalize_in_place))
    print(difference)
    assert difference, "one op is another one now"
    assert not before.diff(nodes_of(normalize)), "the same capture again is the same text"


if __name__ == "__main__":
    main()
