"""Finding the first node of a fork that never joined."""

from __future__ import annotations

import itertools

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
    assert first_unjoined(nodes, edges, frontier) == expected


def test_deep_graphs_need_no_recursion() -> None:
    nodes = list(range(20_000))
    assert first_unjoined(nodes, itertools.pairwise(nodes), [nodes[-1]]) is None
