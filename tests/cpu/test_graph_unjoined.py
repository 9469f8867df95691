"""Finding the first node of a fork that never joined."""

from __future__ import annotations

import pytest

from graphcap_backend.capture.unjoined import first_unjoined


@pytest.mark.parametrize(
    ("nodes", "edges", "frontier", "expected"),
    [
        ([], [], [], None),
        ([10, 11], [(10, 11)], [11], None),
        # 10 forks into 11 (side stream) and 12; nothing waits for 11
        ([10, 11, 12], [(10, 11), (10, 12)], [12], 1),
        # two nodes on the side stream: the first is told
        ([10, 12, 11, 13], [(10, 12), (10, 11), (11, 13)], [12], 2),
        # joined by an event: the frontier has both ends
        ([10, 11, 12], [(10, 11), (10, 12)], [12, 11], None),
        # joined, then more work
        ([10, 11, 12, 13], [(10, 11), (10, 12), (11, 13), (12, 13)], [13], None),
        # forked before any work of its own stream
        ([10, 11], [], [10], 1),
        # everything ran on the side stream
        ([10], [], [], 0),
    ],
)
def test_first_unjoined(
    nodes: list[int], edges: list[tuple[int, int]], frontier: list[int], expected: int | None
) -> None:
    sources, targets = [source for source, _ in edges], [target for _, target in edges]
    assert first_unjoined(nodes, sources, targets, frontier) == expected


@pytest.mark.parametrize(("last", "expected"), [(19_999, None), (19_998, 19_999)])
def test_deep_graphs_need_no_recursion(last: int, expected: int | None) -> None:
    nodes = list(range(20_000))
    assert first_unjoined(nodes, nodes[:-1], nodes[1:], [last]) == expected
