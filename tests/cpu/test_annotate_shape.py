"""Numbering of an executable graph."""

from __future__ import annotations

from dataclasses import dataclass, field

from graphcap_backend.annotate.shape import exec_ids, without_ids


@dataclass
class Shaped:
    kind: str = "kernel"
    body: list[Shaped] | None = field(default=None)


def child(*body: Shaped) -> Shaped:
    return Shaped("child_graph", list(body))


def test_a_flat_graph_keeps_its_ids_and_leaves_out_nodes_that_do_no_work() -> None:
    nodes = [Shaped(), Shaped("empty"), Shaped("memcpy"), Shaped("event_record"), Shaped("mem_alloc")]
    assert list(exec_ids(nodes)) == [(0, (0,)), (2, (2,)), (3, (3,))]


def test_bodies_follow_the_top_level_one_after_another() -> None:
    # As seen: top level 0..3; body of 2 is 4, 5, 6; body of 3 is 7, 8; body of 8 is 9, 10.
    nodes = [Shaped(), Shaped(), child(Shaped(), Shaped(), Shaped()), child(Shaped(), child(Shaped(), Shaped()))]
    assert dict(exec_ids(nodes)) == {
        0: (0,),
        1: (1,),
        4: (2, 0),
        5: (2, 1),
        6: (2, 2),
        7: (3, 0),
        9: (3, 1, 0),
        10: (3, 1, 1),
    }


def test_after_a_conditional_bodies_are_unknown() -> None:
    nodes = [child(Shaped()), Shaped("conditional", [Shaped()]), child(Shaped()), Shaped()]
    assert dict(exec_ids(nodes)) == {3: (3,), 4: (0, 0)}


def test_bodies_that_have_no_ids_are_named_by_their_top_level_node() -> None:
    unlisted = Shaped("conditional")  # as a driver before 13.2 shows it
    nodes = [
        Shaped(),
        child(Shaped()),
        child(child(Shaped("empty"))),
        child(Shaped(), child(unlisted)),
        Shaped("conditional", [Shaped()]),
        child(Shaped("empty")),  # no work, nothing to miss
        child(Shaped()),
    ]
    assert list(without_ids(nodes)) == [3, 4, 6]
    assert list(without_ids(nodes[:3])) == []
