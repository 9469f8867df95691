"""What a capture touched, how free memory of a pool is taken, and how a block is divided."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from graphcap_backend.capture.allocator import (
    FreeBlock,
    Range,
    TouchedMemory,
    divided,
    overlap,
    range_of,
    requests,
)

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


def _snapshot(events: Sequence[tuple[str, int, int]], segments: Sequence[tuple[tuple[int, int], int, int]]) -> Any:
    return {
        "segments": [
            {"segment_pool_id": pool, "address": address, "total_size": size} for pool, address, size in segments
        ],
        "device_traces": [[], [{"action": action, "addr": address, "size": size} for action, address, size in events]],
    }


def test_what_a_capture_touched_is_what_it_allocated_in_its_pool() -> None:
    snapshot = _snapshot(
        [
            ("alloc", 1000, 10),  # another pool's
            ("alloc", 2000, 100),
            ("free_requested", 2000, 100),
            ("free_completed", 2000, 100),
            ("alloc", 2000, 40),
            ("segment_alloc", 4096, 512),
            ("alloc", 4096, 512),
        ],
        [((0, 0), 1000, 500), ((0, 7), 2000, 200), ((0, 7), 4096, 512)],
    )
    touched = TouchedMemory()
    touched.read(snapshot, 1, [0, 7], exact=True)
    assert touched.ranges == [(2000, 2100), (2000, 2040), (4096, 4608)]
    assert (touched.num_bytes, touched.pool_bytes, touched.exact) == (612, 712, True)

    unsure = TouchedMemory()
    unsure.read(snapshot, 1, (0, 7), exact=False)
    assert unsure.ranges == [(2000, 2200), (4096, 4608)]
    assert (unsure.num_bytes, unsure.exact) == (712, False)


def test_what_was_only_kept_free_was_not_touched() -> None:
    kept = torch.empty(100, dtype=torch.uint8)
    first, last = range_of(kept.untyped_storage())
    segments = [((0, 7), first, 100)]
    for later, expected in (
        ([], []),
        ([("alloc", first, 100)], [(first, last)]),
        ([("alloc", first, 8)], [(first, first + 8)]),
    ):
        touched = TouchedMemory()
        touched.leave_out(kept.untyped_storage())
        touched.read(_snapshot([("alloc", first, 100), *later], segments), 1, (0, 7), exact=True)
        assert touched.ranges == expected


@pytest.mark.parametrize(
    ("ranges", "expected"),
    [([], 0), ([(10, 20), (10, 20)], 10), ([(30, 40), (10, 20)], 20), ([(10, 40), (20, 30), (35, 50)], 40)],
)
def test_bytes_are_counted_once(ranges: list[Range], expected: int) -> None:
    assert TouchedMemory(ranges).num_bytes == expected


@pytest.mark.parametrize(
    ("one", "expected"), [((0, 0), False), ((5, 10), False), ((5, 11), True), ((12, 13), True), ((20, 30), False)]
)
def test_ranges_that_only_meet_do_not_overlap(one: Range, expected: bool) -> None:
    assert overlap(one, [(10, 20)]) is expected
