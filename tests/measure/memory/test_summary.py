"""What a result keeps of a recording: the peak by category, phases, a timeline, lists."""

from __future__ import annotations

from typing import Any

import pytest

from lmlab.measure.memory.categories import CATEGORIES
from lmlab.measure.memory.observer import NewStorage, Observer
from lmlab.measure.memory.recorder import KnownTensor, Recording, Span
from lmlab.measure.memory.snapshot import history_of
from lmlab.measure.memory.sources import Source
from lmlab.measure.memory.summary import MAX_VERTICES, summarize
from tests.measure.memory.snapshots import alloc, block, frame, free, out_of_memory, snapshot

KIB = 1024
WEIGHT, WORKSPACE, MARKS = 0, 100 * KIB, [200 * KIB, 201 * KIB, 202 * KIB, 203 * KIB]
ACTIVATION, COPY, GRADIENT = 300 * KIB, 400 * KIB, 500 * KIB
LINE = frame("/x/src/lmlab/model/layers.py", 55, "forward")


def new_storage(address: int, size: int, copy_of: str | None = None) -> NewStorage:
    made = {"operator": "mm", "shape": (2, 3), "type": "bf16", "source": Source("a.py", 1, "f")}
    return NewStorage(address=address, size=size, copy_of=copy_of, **made)  # type: ignore[arg-type]


def mark(number: int) -> list[dict[str, Any]]:
    return alloc(MARKS[number], 1)


TRACE = [
    *mark(0),
    *alloc(COPY, 2 * KIB, LINE),
    *alloc(ACTIVATION, 8 * KIB, LINE),
    *alloc(700 * KIB, 1 * KIB),
    *free(700 * KIB, 1 * KIB),
    *mark(1),
    *alloc(GRADIENT, 4 * KIB),
    *alloc(800 * KIB, 16 * KIB),
    *free(ACTIVATION, 8 * KIB),
    *free(COPY, 2 * KIB),
    *free(800 * KIB, 16 * KIB),
    *mark(2),
]
BLOCKS = [
    block(WEIGHT, 4 * KIB, 4 * KIB),
    block(WORKSPACE, 32 * KIB, 32 * KIB),
    block(GRADIENT, 5 * KIB, 4 * KIB),
    *(block(address, 512, 1) for address in MARKS),
]
WEIGHT_KNOWN = {WEIGHT: KnownTensor(category="parameters", name="layers.3.w1", size=4 * KIB)}
ALL_KNOWN = {
    **WEIGHT_KNOWN,
    GRADIENT: KnownTensor(category="gradients", name="gradient of layers.3.w1", size=4 * KIB),
}


def recording(trace: list[dict[str, Any]], **more: Any) -> Recording:
    observer = Observer({})
    observer.storages = [
        new_storage(COPY, 2 * KIB, copy_of="layers.3.w1"),
        new_storage(ACTIVATION, 8 * KIB),
    ]
    values: dict[str, Any] = {
        "history": history_of(snapshot(trace, *BLOCKS), 0, max_entries=10**6),
        "phases": [Span(name="forward", start=0, end=5), Span(name="backward", start=5, end=11)],
        "known": [(0, WEIGHT_KNOWN), (5, WEIGHT_KNOWN), (11, ALL_KNOWN)],
        "observer": observer,
        "marks": frozenset({0, 5, 11}),
        **more,
    }
    return Recording(**values)


@pytest.fixture
def summary() -> dict[str, Any]:
    return summarize(recording(TRACE), keeps_graph=True, stream_bytes=8 * KIB)


def test_the_peak_is_the_sum_of_its_categories(summary: dict[str, Any]) -> None:
    assert summary["peak_phase"] == "backward"
    # Of four marks in the snapshot two exist at the peak, one comes later, one has no event.
    assert summary["live_categories_bytes"] == {
        "parameters": 4 * KIB,
        "optimizer_state": 0,
        "gradients": 5 * KIB,
        "weight_copies": 2 * KIB,
        "activations": 8 * KIB,
        "workspace": (32 + 16) * KIB + 512,
        "other": 2 * 512,
    }
    assert summary["replayed_bytes"] == sum(summary["live_categories_bytes"].values())


def test_phases_have_their_own_peaks_and_requested_bytes_exclude_rounding(
    summary: dict[str, Any],
) -> None:
    assert summary["replayed_requested_bytes"] == (4 + 4 + 2 + 8 + 32 + 16) * KIB + 3

    forward, backward = summary["phases"]
    assert (forward["first_event"], forward["last_event"]) == (0, backward["first_event"])
    assert forward["peak_bytes"] < backward["peak_bytes"] == summary["replayed_bytes"]


def test_the_timeline_adds_up_to_the_peak(summary: dict[str, Any]) -> None:
    timeline = summary["timeline"]
    totals = [sum(values) for values in zip(*timeline["bytes"].values(), strict=True)]
    assert max(totals) == summary["replayed_bytes"]
    assert timeline["event"][totals.index(max(totals))] == summary["peak_event"]
    assert set(timeline["bytes"]) < set(CATEGORIES), "empty categories have no curve"
    assert len(timeline["event"]) <= MAX_VERTICES


def test_lists_show_source_lines_and_names(summary: dict[str, Any]) -> None:
    activation = next(row for row in summary["live_largest"] if row["category"] == "activations")
    assert (activation["file"], activation["line"]) == ("lmlab/model/layers.py", 55)
    assert activation["what"] == "mm 2×3 bf16"
    gradient = next(row for row in summary["live_largest"] if row["category"] == "gradients")
    assert (gradient["what"], gradient["file"]) == ("gradient of layers.*.w1", None)
    by_line = [row for row in summary["live_lines"] if row["file"] is not None]
    assert [(row["category"], row["bytes"]) for row in by_line] == [
        ("activations", 8 * KIB),
        ("weight_copies", 2 * KIB),
    ]


def test_tensors_of_a_given_size_are_counted_with_their_lines(summary: dict[str, Any]) -> None:
    assert summary["stream"] == {
        "bytes": 8 * KIB,
        "allocated": 1,
        "live_at_peak": 1,
        "lines": {"lmlab/model/layers.py:55": 1},
    }


def test_after_running_out_of_memory_the_failure_is_described() -> None:
    trace = [*TRACE[:9], *free(800 * KIB, 16 * KIB), *out_of_memory(2**40, 1)]
    failed = recording(
        trace,
        phases=[Span(name="forward", start=0, end=5), Span(name="backward", start=5, end=9)],
        known=[(0, WEIGHT_KNOWN), (5, WEIGHT_KNOWN), (9, ALL_KNOWN)],
        out_of_memory="no",
    )
    summary = summarize(failed, keeps_graph=True, stream_bytes=8 * KIB)
    # Two marks in the snapshot without an event are workspace, like the 32 KiB.
    assert summary["live_categories_bytes"]["workspace"] == 32 * KIB + 2 * 512
    assert summary["replayed_bytes"] > sum(summary["live_categories_bytes"].values())
