from __future__ import annotations

import difflib
import itertools
import time

from hypothesis import given, settings
from hypothesis import strategies as st

from graphcap_backend.capture.align import align, align_levels

WORDS = st.lists(st.sampled_from("abcd"), max_size=25)


def longest_common(a: list[str], b: list[str]) -> int:
    best = [[0] * (len(b) + 1) for _ in range(len(a) + 1)]
    for i, x in enumerate(a):
        for j, y in enumerate(b):
            best[i + 1][j + 1] = best[i][j] + 1 if x == y else max(best[i][j + 1], best[i + 1][j])
    return best[-1][-1]


@given(WORDS, WORDS)
@settings(deadline=None)
def test_pairs_are_equal_items_ascending_and_as_many_as_can_be(a: list[str], b: list[str]) -> None:
    pairs = align(a, b)
    assert all(a[i] == b[j] for i, j in pairs)
    assert all(p[0] < q[0] and p[1] < q[1] for p, q in itertools.pairwise(pairs))
    assert len(pairs) == longest_common(a, b)


def test_past_the_bound_of_one_search_the_pairs_are_still_right() -> None:
    a = [f"a{i}" if i % 3 else i % 7 for i in range(3000)]
    b = [f"a{i}" if i % 3 else i % 5 for i in range(3000)][::-1]
    pairs = align(a, b)
    assert pairs
    assert all(a[i] == b[j] for i, j in pairs)
    assert all(p[0] < q[0] and p[1] < q[1] for p, q in itertools.pairwise(pairs))


def test_lists_with_nothing_but_names_in_common_take_seconds_at_most() -> None:
    a = [(i * 7919) % 11 for i in range(10_000)]
    b = [(i * 104_729 + i // 3) % 11 for i in range(10_000)]
    start = time.perf_counter()
    pairs = align(a, b)
    assert time.perf_counter() - start < 8
    assert len(pairs) > 1000


def test_one_item_out_of_many_equal_ones_like_difflib() -> None:
    a = list("xxabxxabxxab")
    b = list("xxabxxbxxab")
    blocks = difflib.SequenceMatcher(None, a, b, autojunk=False).get_matching_blocks()
    assert len(align(a, b)) == sum(block.size for block in blocks)


def test_few_strict_matches_do_not_tear_a_changed_list_apart() -> None:
    # Every item but the equal "f" changed its second part; one "f" more in front.
    before = [("k", i) for i in range(6)] + [("f", 0)]
    after = [("f", 0), *(("k", i + 100) for i in range(6)), ("f", 0)]
    sides = (before, after)
    pairs = align_levels(before, after, [lambda of, i: sides[of][i], lambda of, i: sides[of][i][0]])
    assert pairs == [(i, i + 1) for i in range(7)]
