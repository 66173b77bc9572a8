"""Replay: lifetimes, the peak, and what was live before the first event."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from lmlab.measure.memory.history import Block, Event, History
from lmlab.measure.memory.replay import BEFORE, Replay, replay
from lmlab.measure.memory.snapshot import history_of
from tests.measure.memory.snapshots import alloc, block, free, snapshot


def replayed(trace: list[dict[str, object]], *blocks: dict[str, object]) -> Replay:
    return replay(history_of(snapshot(trace, *blocks), 0, max_entries=10**6))


def totals(result: Replay) -> list[int]:
    return result.totals(lambda allocation: allocation.size)


def test_the_peak_is_the_first_highest_position_in_the_given_interval() -> None:
    trace = alloc(0, 4096) + free(0, 4096) + alloc(0, 512) + free(0, 512) + alloc(0, 512)
    result = replayed(trace, block(0, 512, 512))
    assert result.peak_position(BEFORE, result.length) == 0
    assert result.peak_position(1, result.length) == 2
    lives = [(each.size, each.born, each.died) for each in result.allocations]
    assert lives == [(4096, 0, 1), (512, 2, 3), (512, 4, 5)], "one address, three allocations"


def test_a_block_that_is_live_at_the_end_has_its_real_size() -> None:
    result = replayed(alloc(0, 6_815_744) + free(10**8, 1000), block(0, 7_340_032, 6_815_744))
    assert [each.block_bytes for each in result.allocations] == [1024, 7_340_032]
    assert [each.size for each in result.allocations] == [1000, 6_815_744]


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(1, 9)), max_size=40),
    st.sets(st.integers(0, 5)),
)
def test_totals_agree_with_counting_live_blocks_one_by_one(
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
        at = sum(each.size for each in result.live_at(position))
        assert at == expected[position - BEFORE]
