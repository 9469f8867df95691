"""How free memory of a pool is taken: which requests get it, and how a block is divided."""

from __future__ import annotations

import pytest

from graphcap_backend.capture.allocator import FreeBlock, Range, divided, requests

MIB = 1 << 20


def _block(first: int, num_bytes: int, *, is_large: bool) -> FreeBlock:
    return FreeBlock(stream=0, range=(first, first + num_bytes), is_large=is_large)


def test_requests_come_largest_first_and_small_memory_in_small_requests() -> None:
    blocks = [
        _block(0, 512, is_large=False),
        _block(8 * MIB, 2 * MIB, is_large=False),
        _block(16 * MIB, 20 * MIB, is_large=True),
        _block(64 * MIB, MIB + 512, is_large=False),
    ]
    assert requests(blocks) == [20 * MIB, MIB, MIB, MIB, 512, 512]


@pytest.mark.parametrize(
    ("ranges", "expected"),
    [
        ([], [((0, 64), False)]),
        ([(64, 70)], [((0, 64), False)]),
        ([(0, 64)], [((0, 64), True)]),
        ([(0, 8)], [((0, 8), True), ((8, 64), False)]),
        ([(56, 64)], [((0, 56), False), ((56, 64), True)]),
        ([(16, 24), (32, 64)], [((0, 16), False), ((16, 24), True), ((24, 32), False), ((32, 64), True)]),
        ([(16, 24), (20, 40)], [((0, 16), False), ((16, 24), True), ((24, 40), True), ((40, 64), False)]),
        ([(16, 40), (20, 24)], [((0, 16), False), ((16, 40), True), ((40, 64), False)]),
        ([(-9, 8), (60, 99)], [((0, 8), True), ((8, 60), False), ((60, 64), True)]),
    ],
)  # fmt: skip
def test_a_block_is_divided_at_what_is_wanted(ranges: list[Range], expected: list[tuple[Range, bool]]) -> None:
    in_bytes = [(first * MIB, last * MIB) for first, last in ranges]
    parts = divided((0, 64 * MIB), in_bytes)
    assert parts == [((first * MIB, last * MIB), wanted) for (first, last), wanted in expected]


@pytest.mark.parametrize("first", [0, 1, 511, MIB - 1, MIB, MIB + 512, 5 * MIB, 31 * MIB, 32 * MIB - 100])
@pytest.mark.parametrize("num_bytes", [1, 4096, MIB + 1, 7 * MIB])
def test_no_part_is_too_small_and_all_that_is_wanted_is_covered(first: int, num_bytes: int) -> None:
    block = (MIB, 33 * MIB)
    wanted = (block[0] + first, min(block[0] + first + num_bytes, block[1]))
    parts = divided(block, [wanted])
    assert [part[0] for part, _ in parts] == [block[0], *(part[1] for part, _ in parts[:-1])]
    assert parts[-1][0][1] == block[1]
    assert all(last - first > MIB and first % 512 == last % 512 == 0 for (first, last), _ in parts)
    ((begin, end),) = [part for part, is_wanted in parts if is_wanted]
    assert begin <= wanted[0]
    assert wanted[1] <= end
    assert end - begin <= max(num_bytes, MIB) + 2 * MIB


def test_a_block_that_cannot_be_divided_is_taken_whole() -> None:
    block = (0, 2 * MIB)
    assert divided(block, [(MIB, MIB + 512)]) == [(block, True)]
