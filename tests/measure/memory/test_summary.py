"""A history replayed, and what a result stores of it: categories, phases, a timeline, lists."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmlab.measure.memory.history import Block, Event, History, active_bytes, live_at, replay
from lmlab.measure.memory.observer import NewStorage, Observer, Source
from lmlab.measure.memory.recorder import KnownTensor, Recording, Span
from lmlab.measure.memory.snapshot import history_of
from lmlab.measure.memory.summary import CATEGORIES, outline, summarize
from tests.measure.memory.test_snapshot import alloc, block, frame, free, out_of_memory, snapshot

KIB = 1024
WEIGHT, WORKSPACE, MARKS = 0, 100 * KIB, [200 * KIB, 201 * KIB, 202 * KIB, 203 * KIB]
ACTIVATION, COPY, GRAD, SCRATCH = 300 * KIB, 400 * KIB, 500 * KIB, 800 * KIB
LINE = frame("/x/src/lmlab/model/layers.py", 55, "forward")
TRACE = [
    *alloc(MARKS[0], 1),
    *alloc(COPY, 2 * KIB, LINE),
    *alloc(ACTIVATION, 8 * KIB, LINE),
    *alloc(700 * KIB, 1 * KIB),
    *free(700 * KIB, 1 * KIB),
    *alloc(MARKS[1], 1),
    *alloc(GRAD, 4 * KIB),
    *alloc(SCRATCH, 16 * KIB),
    *free(ACTIVATION, 8 * KIB),
    *free(COPY, 2 * KIB),
    *free(SCRATCH, 16 * KIB),
    *alloc(MARKS[2], 1),
]
BLOCKS = [
    block(WEIGHT, 4 * KIB, 4 * KIB),
    block(WORKSPACE, 32 * KIB, 32 * KIB),
    block(GRAD, 5 * KIB, 4 * KIB),
    *(block(address, 512, 1) for address in MARKS),
]
WEIGHTS = {WEIGHT: KnownTensor(category="parameters", name="layers.3.w1", size=4 * KIB)}
GRADIENTS = {GRAD: KnownTensor(category="gradients", name="gradient of layers.3.w1", size=4 * KIB)}


def summary_of(trace: list[dict[str, Any]], end: int, failed: str | None = None) -> dict[str, Any]:
    """A forward and a backward phase that ends at that event."""
    made: Any = {"operator": "mm", "shape": (2, 3), "type": "bf16", "source": Source("a", 1, "f")}
    observer = Observer({})
    observer.storages = [
        NewStorage(address=COPY, size=2 * KIB, copy_of="layers.3.w1", **made),
        NewStorage(address=ACTIVATION, size=8 * KIB, copy_of=None, **made),
    ]
    mark = KnownTensor(category="other", name="mark", size=1)
    marks = dict.fromkeys(MARKS[: 2 if failed else 3], mark)
    recording = Recording(
        history=history_of(snapshot(trace, *BLOCKS), 0, max_entries=10**6),
        phases=[Span(name="forward", start=1, end=6), Span(name="backward", start=6, end=end)],
        known=[(1, WEIGHTS | marks), (6, WEIGHTS | marks), (end, WEIGHTS | GRADIENTS | marks)],
        observer=observer,
        out_of_memory=failed,
    )
    return summarize(recording, keeps_graph=True, stream_bytes=8 * KIB)


@pytest.fixture(scope="module")
def summary() -> dict[str, Any]:
    return summary_of(TRACE, 12)


def test_the_peak_is_the_sum_of_its_categories(summary: dict[str, Any]) -> None:
    assert summary["peak_phase"] == "backward"
    # Of four marks in the snapshot two exist at the peak, one comes later, one has no event.
    assert summary["live_categories"] == {
        "parameters": 4 * KIB,
        "optimizer_state": 0,
        "gradients": 5 * KIB,
        "weight_copies": 2 * KIB,
        "activations": 8 * KIB,
        "workspace": (32 + 16) * KIB + 512,
        "other": 2 * 512,
    }
    assert summary["replayed_peak_bytes"] == sum(summary["live_categories"].values())
    assert summary["requested_peak_bytes"] == (4 + 4 + 2 + 8 + 32 + 16) * KIB + 3
    forward, backward = summary["phases"]
    assert (forward["first_event"], forward["last_event"]) == (0, backward["first_event"])
    assert forward["peak_bytes"] < backward["peak_bytes"] == summary["replayed_peak_bytes"]
    timeline = summary["timeline"]
    totals = [sum(values) for values in zip(*timeline["bytes"].values(), strict=True)]
    assert max(totals) == summary["replayed_peak_bytes"]
    assert timeline["event"][totals.index(max(totals))] == summary["peak_event"]
    assert set(timeline["bytes"]) < set(CATEGORIES), "empty categories have no curve"


def test_lists_show_names_source_lines_and_tensors_of_one_size(summary: dict[str, Any]) -> None:
    largest = {row["category"]: (row["what"], row["file"]) for row in summary["live_largest"]}
    assert largest["activations"] == ("mm 2×3 bf16", "lmlab/model/layers.py")
    assert largest["gradients"] == ("gradient of layers.*.w1", None)
    lines = [(row["category"], row["bytes"]) for row in summary["live_lines"] if row["file"]]
    assert lines == [("activations", 8 * KIB), ("weight_copies", 2 * KIB)]
    assert (summary["stream_allocations"], summary["stream_live"]) == (1, 1)
    assert summary["stream_lines"] == {"lmlab/model/layers.py:55": 1}


def test_after_running_out_of_memory_the_failure_is_described() -> None:
    trace = [*TRACE[:9], *free(SCRATCH, 16 * KIB), *out_of_memory(2**40, 1)]
    failed = summary_of(trace, 10, failed="no")
    # Two marks in the snapshot without an event are workspace, like the 32 KiB.
    assert failed["live_categories"]["workspace"] == 32 * KIB + 2 * 512
    assert failed["replayed_peak_bytes"] > sum(failed["live_categories"].values())


@given(st.lists(st.integers(0, 10**12), min_size=1, max_size=500), st.integers(4, 60))
def test_the_peak_the_minimum_and_the_ends_are_kept(totals: list[int], max_vertices: int) -> None:
    chosen = outline(totals, max_vertices)
    assert len(chosen) <= max_vertices
    assert chosen == sorted(set(chosen))
    assert max(totals[position] for position in chosen) == max(totals)
    assert min(totals[position] for position in chosen) == min(totals)
    assert {0, len(totals) - 1} <= set(chosen)
    if len(totals) <= max_vertices:
        assert chosen == list(range(len(totals)))


def test_every_bucket_keeps_its_own_peak() -> None:
    totals = [position % 100 for position in range(1000)]
    chosen = outline(totals, 22)
    assert [position for position in chosen if totals[position] == 99] == list(range(99, 1000, 100))


def test_a_block_that_is_live_at_the_end_has_its_real_size() -> None:
    trace = alloc(0, 6_815_744) + free(10**8, 1000)
    taken = snapshot(trace, block(0, 7_340_032, 6_815_744))
    rows = replay(history_of(taken, 0, max_entries=10**6))
    found = rows[["size", "block_bytes", "born", "died"]].to_numpy().tolist()
    assert found == [[1000, 1024, 0, 2], [6_815_744, 7_340_032, 1, 3]]


@settings(max_examples=40)
@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(1, 9)), max_size=40),
    st.sets(st.integers(0, 5)),
)
def test_totals_agree_with_counting_blocks(moves: list[tuple[int, int]], before: set[int]) -> None:
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
    rows = replay(History(events=events, live_at_end=blocks))
    assert active_bytes(rows, len(events), of="size").tolist() == expected
    for position, total in enumerate(expected):
        assert live_at(rows, position)["size"].sum() == total
