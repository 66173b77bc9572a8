"""Replay finds what was there before, the highest moment, and who was live at it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lmlab.measure.memory.history import Block, Event, History
from lmlab.measure.memory.replay import BEFORE, Replay, replay
from lmlab.measure.memory.snapshot import history_of
from tests.measure.memory.snapshots import alloc, block, free, snapshot


def replayed(trace: list[dict[str, object]], *blocks: dict[str, object]) -> Replay:
    return replay(history_of(snapshot(trace, *blocks), 0, max_entries=10**6))


def totals(result: Replay) -> list[int]:
    return result.totals(lambda piece: piece.size)


def test_bytes_rise_with_an_allocation_and_fall_with_its_free() -> None:
    result = replayed(alloc(512, 100) + alloc(1024, 30) + free(512, 100), block(1024, 512, 30))
    assert totals(result) == [0, 100, 130, 30]


def test_what_was_live_before_is_the_baseline() -> None:
    never_freed, freed_later = block(0, 1024, 1000), free(4096, 50)
    result = replayed(alloc(2048, 10) + freed_later, never_freed, block(2048, 512, 10))
    assert totals(result) == [1050, 1060, 1010]
    assert {piece.address for piece in result.live_at(BEFORE)} == {0, 4096}


def test_the_peak_is_the_first_of_the_highest_moments() -> None:
    result = replayed(alloc(512, 512) + free(512, 512) + alloc(512, 512), block(512, 512, 512))
    assert result.peak_position(BEFORE, result.length) == 0


def test_the_peak_is_looked_for_among_the_positions_given() -> None:
    trace = alloc(0, 4096) + free(0, 4096) + alloc(0, 512)
    result = replayed(trace, block(0, 512, 512))
    assert result.peak_position(BEFORE, 3) == 0
    assert result.peak_position(1, 3) == 2


def test_an_address_used_twice_is_two_pieces() -> None:
    result = replayed(alloc(512, 100) + free(512, 100) + alloc(512, 7), block(512, 512, 7))
    assert [(p.size, p.born, p.died) for p in result.pieces] == [(100, 0, 1), (7, 2, 3)]


def test_a_block_that_is_live_at_the_end_tells_how_large_it_is() -> None:
    """Three of 6.5 MiB fill a segment of 20 MiB, and the rest of it is not worth splitting."""
    result = replayed(alloc(0, 6_815_744) + free(10**8, 1000), block(0, 7_340_032, 6_815_744))
    assert [piece.block_bytes for piece in result.pieces] == [1024, 7_340_032]
    assert [piece.size for piece in result.pieces] == [1000, 6_815_744]


@given(
    st.lists(
        st.tuples(st.integers(0, 5), st.integers(1, 9)),
        max_size=40,
    ),
    st.sets(st.integers(0, 5)),
)
def test_totals_are_those_of_counting_live_blocks_one_by_one(
    moves: list[tuple[int, int]], before: set[int]
) -> None:
    live = dict.fromkeys(before, 3)
    events, expected = [], [sum(live.values())]
    for address, size in moves:
        if address in live:
            events.append(Event(kind="free", address=address, size=live.pop(address)))
        else:
            live[address] = size
            events.append(Event(kind="alloc", address=address, size=size))
        expected.append(sum(live.values()))
    blocks = [Block(address=a, size=s, block_bytes=s) for a, s in live.items()]
    result = replay(History(events=events, live_at_end=blocks))
    assert totals(result) == expected
    for position in range(BEFORE, result.length):
        at = sum(piece.size for piece in result.live_at(position))
        assert at == expected[position - BEFORE]
