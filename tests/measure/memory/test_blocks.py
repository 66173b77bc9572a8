"""The allocator's rule for splitting: what a block is, worked out from its beginning."""

from __future__ import annotations

import pytest

from lmlab.measure.memory.blocks import given_bytes, rounded
from tests.measure.memory.snapshots import alloc, entry, free

MIB = 2**20
LARGE = {0: 20 * MIB}


@pytest.mark.parametrize(("asked", "given"), [(1, 512), (512, 512), (513, 1024), (0, 512)])
def test_blocks_are_multiples_of_512_bytes(asked: int, given: int) -> None:
    assert rounded(asked) == given


def test_a_large_block_keeps_a_rest_of_up_to_a_mebibyte() -> None:
    """Three of 6.5 MiB fill a segment of 20 MiB: the third one takes what is left."""
    size = 6_815_744
    trace = alloc(0, size) + alloc(size, size) + alloc(2 * size, size)
    assert given_bytes(trace, LARGE, [0, size, 2 * size]) == [size, size, 20 * MIB - 2 * size]


@pytest.mark.parametrize(("rest", "kept"), [(MIB, True), (MIB + 512, False)])
def test_a_rest_of_more_is_split_off(rest: int, kept: bool) -> None:
    size = 20 * MIB - rest
    assert given_bytes(alloc(0, size), LARGE, [0]) == [size + rest if kept else size]


def test_a_small_block_is_split_to_the_last_512_bytes() -> None:
    assert given_bytes(alloc(0, 2 * MIB - 1024 * 1024), {0: 2 * MIB}, [0]) == [MIB]
    assert given_bytes(alloc(MIB, MIB - 512), {0: 2 * MIB}, [MIB]) == [MIB - 512]


def test_free_space_ends_where_the_next_block_in_use_begins() -> None:
    """The second block is older than the trace and goes within it; the first comes before that."""
    trace = alloc(0, 4 * MIB) + free(5 * MIB, 100) + free(0, 4 * MIB) + alloc(0, 4 * MIB)
    assert given_bytes(trace, LARGE, [0]) == [5 * MIB, 4 * MIB]


def test_segments_come_and_go() -> None:
    trace = [
        *(alloc(0, 19 * MIB + 512) + free(0, 1)),
        entry("segment_free", 0, 20 * MIB),
        entry("segment_alloc", 0, 32 * MIB),
        *alloc(0, 19 * MIB + 512),
    ]
    assert given_bytes(trace, {0: 32 * MIB}, [0]) == [20 * MIB, 19 * MIB + 512]


def test_segments_that_grow_are_cut_exactly() -> None:
    trace = [entry("segment_map", 0, 20 * MIB), *alloc(0, 19 * MIB + 512)]
    assert given_bytes(trace, LARGE, [0]) == [19 * MIB + 512]


def test_an_address_in_no_known_segment_gets_what_was_asked_for() -> None:
    assert given_bytes(alloc(2**40, 5 * MIB), LARGE, [2**40]) == [5 * MIB]
    assert given_bytes(alloc(0, 5 * MIB), {}, [0]) == [5 * MIB]
