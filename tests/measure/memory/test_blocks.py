"""The allocator's splitting rule: block sizes computed from the trace."""

from __future__ import annotations

from typing import Any

import pytest

from lmlab.measure.memory.blocks import block_sizes, rounded
from tests.measure.memory.snapshots import alloc, entry, free

MIB = 2**20
THIRD = 6_815_744  # three of 6.5 MiB fill a segment of 20 MiB


@pytest.mark.parametrize(("asked", "given"), [(1, 512), (512, 512), (513, 1024), (0, 512)])
def test_blocks_are_multiples_of_512_bytes(asked: int, given: int) -> None:
    assert rounded(asked) == given


CASES: dict[str, tuple[list[dict[str, Any]], int, list[int], list[int]]] = {
    "a large block keeps a remainder of up to a mebibyte": (
        alloc(0, THIRD) + alloc(THIRD, THIRD) + alloc(2 * THIRD, THIRD),
        20 * MIB,
        [0, THIRD, 2 * THIRD],
        [THIRD, THIRD, 20 * MIB - 2 * THIRD],
    ),
    "exactly a mebibyte": (alloc(0, 19 * MIB), 20 * MIB, [0], [20 * MIB]),
    "more is split off": (alloc(0, 19 * MIB - 512), 20 * MIB, [0], [19 * MIB - 512]),
    "a small block keeps nothing": (alloc(MIB, MIB - 512), 2 * MIB, [MIB], [MIB - 512]),
    # The second block is older than the trace and freed in it; the first is made before that.
    "free space ends at the next block in use": (
        alloc(0, 4 * MIB) + free(5 * MIB, 100) + free(0, 4 * MIB) + alloc(0, 4 * MIB),
        20 * MIB,
        [0],
        [5 * MIB, 4 * MIB],
    ),
    "segments come and go": (
        [
            *(alloc(0, 19 * MIB + 512) + free(0, 1)),
            entry("segment_free", 0, 20 * MIB),
            entry("segment_alloc", 0, 32 * MIB),
            *alloc(0, 19 * MIB + 512),
        ],
        32 * MIB,
        [0],
        [20 * MIB, 19 * MIB + 512],
    ),
    "expandable segments are split exactly": (
        [entry("segment_map", 0, 20 * MIB), *alloc(0, 19 * MIB + 512)],
        20 * MIB,
        [0],
        [19 * MIB + 512],
    ),
    "an unknown segment": (alloc(2**40, 5 * MIB), 20 * MIB, [2**40], [5 * MIB]),
}


@pytest.mark.parametrize(("trace", "segment", "live", "expected"), CASES.values(), ids=CASES)
def test_block_sizes_follow_the_allocators_rule(
    trace: list[dict[str, Any]], segment: int, live: list[int], expected: list[int]
) -> None:
    assert block_sizes(trace, {0: segment}, live) == expected
