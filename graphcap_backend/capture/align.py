"""Alignment of two sequences of hashable keys: which items of one are which of the other."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

Pair = tuple[int, int]
# Edits that one search may spend. Past it the best path so far is kept and a new search starts
# there, which bounds the time for lists that have nothing in common at some loss of matches.
_MAX_EDITS = 128


def align(before: Sequence[Hashable], after: Sequence[Hashable]) -> list[Pair]:
    """Pairs of equal items, ascending in both: the longest such list for similar sequences.

    Takes O((n + m) x edits), and never more than about 128 x (n + m) steps.
    """
    # Items that the other side does not have only make the search long.
    common = set(before) & set(after)
    left = [index for index, key in enumerate(before) if key in common]
    right = [index for index, key in enumerate(after) if key in common]
    a = [before[index] for index in left]
    b = [after[index] for index in right]
    pairs: list[Pair] = []
    x = y = 0
    while x < len(a) and y < len(b):
        x, y, found = _search(a, b, x, y)
        pairs.extend(found)
    return [(left[i], right[j]) for i, j in pairs]


def align_levels(
    before: Sequence[object],
    after: Sequence[object],
    levels: Sequence[Callable[[bool, int], Hashable]],
) -> list[Pair]:
    """Align by the strictest key, then what lies between the matches by each looser key.

    Each of ``levels`` gives the key of an item: (is it of ``after``, its index) -> key. A strict
    level that matches less than half of the shorter side is skipped: its few matches are chance
    (equal fills among kernels that all changed) and would tear the rest apart.
    """
    pairs: list[Pair] = []
    for number, key in enumerate(levels):
        last = number == len(levels) - 1
        added: list[Pair] = []
        for (a0, a1), (b0, b1) in _gaps(pairs, len(before), len(after)):
            found = align([key(False, i) for i in range(a0, a1)], [key(True, j) for j in range(b0, b1)])
            if last or 2 * len(found) >= min(a1 - a0, b1 - b0):
                added.extend((a0 + i, b0 + j) for i, j in found)
        pairs = sorted(pairs + added)
    return pairs


def _gaps(pairs: Sequence[Pair], a_end: int, b_end: int) -> list[tuple[Pair, Pair]]:
    """The stretches between matches in which both sides still have items."""
    gaps = []
    a = b = 0
    for i, j in [*pairs, (a_end, b_end)]:
        if a < i and b < j:
            gaps.append(((a, i), (b, j)))
        a, b = i + 1, j + 1
    return gaps


def _search(a: Sequence[Hashable], b: Sequence[Hashable], x0: int, y0: int) -> tuple[int, int, list[Pair]]:
    """Myers' greedy search from (x0, y0): where it got to, and the matches on the way.

    A path may leave the grid, as in the textbook; nothing matches out there.
    """
    n, m = len(a), len(b)
    shift = x0 - y0
    history: list[dict[int, int]] = []  # per number of edits: diagonal -> furthest x on it
    best = (x0, y0, 0, 0)
    for edits in range(_MAX_EDITS + 1):
        row: dict[int, int] = {}
        for k in range(-edits, edits + 1, 2):
            x = _start(history, edits, k, x0)[0]
            y = x - k - shift
            while x < n and y < m and a[x] == b[y]:
                x += 1
                y += 1
            row[k] = x
            if best[0] + best[1] < x + y and x <= n and y <= m:
                best = (x, y, k, edits)
        history.append(row)
        if best[:2] == (n, m):
            break
    x, y, k, edits = best
    return x, y, _matches(history, edits, k, x0, shift)


def _start(history: Sequence[dict[int, int]], edits: int, k: int, x0: int) -> tuple[int, int]:
    """Where the run of matches on diagonal ``k`` starts, and the diagonal it is come to from."""
    if edits == 0:
        return x0, 0
    row = history[edits - 1]
    if k == -edits or (k != edits and row[k - 1] < row[k + 1]):
        return row[k + 1], k + 1
    return row[k - 1] + 1, k - 1


def _matches(history: Sequence[dict[int, int]], edits: int, k: int, x0: int, shift: int) -> list[Pair]:
    pairs: list[Pair] = []
    for step in range(edits, -1, -1):
        start, previous = _start(history, step, k, x0)
        pairs.extend((x, x - k - shift) for x in range(history[step][k] - 1, start - 1, -1))
        k = previous
    pairs.reverse()
    return pairs
