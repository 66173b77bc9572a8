"""Snapshots become histories, and a pickle is read without running what it names."""

from __future__ import annotations

import io
import os
import pickle
from pathlib import Path
from typing import Any

import pytest

from lmlab.measure.memory.snapshot import SnapshotError, history_of, load, read
from tests.measure.memory.snapshots import alloc, block, entry, frame, free, out_of_memory, snapshot


class Hostile:
    """Runs a command when it is unpickled the ordinary way."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> Any:
        return os.system, (self.command,)


def pickled(value: object) -> io.BytesIO:
    return io.BytesIO(pickle.dumps(value))


def test_a_snapshot_comes_back_as_it_was(tmp_path: Path) -> None:
    original = snapshot(alloc(512, 100, frame("model.py")), block(512, 512, 100))
    (tmp_path / "a.pickle").write_bytes(pickle.dumps(original))
    assert load(tmp_path / "a.pickle") == original


def test_a_hostile_pickle_is_refused_and_does_nothing(tmp_path: Path) -> None:
    trace = tmp_path / "was_here"
    evil = {**snapshot([]), "external_annotations": [Hostile(f"touch {trace}")]}
    with pytest.raises(SnapshotError, match=r"names posix\.system; a snapshot holds plain values"):
        read(pickled(evil))
    assert not trace.exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"not a pickle", "not a readable pickle"),
        (pickle.dumps(snapshot([]))[:-20], "not a readable pickle"),
        (pickle.dumps([1, 2]), "holds no segments"),
        (pickle.dumps({"segments": []}), "holds no segments"),
    ],
    ids=["text", "cut off", "a list", "half a snapshot"],
)
def test_what_is_no_snapshot_says_so(content: bytes, message: str) -> None:
    with pytest.raises(SnapshotError, match=message):
        read(io.BytesIO(content))


def test_memory_is_in_use_until_its_free_is_completed() -> None:
    events = history_of(snapshot(alloc(512, 100) + free(512, 100)), 0, max_entries=99).events
    assert [(event.kind, event.size) for event in events] == [("alloc", 100), ("free", 100)]


def test_actions_on_segments_are_no_events_of_tensors() -> None:
    trace = [entry("segment_alloc", 0, 2**21), *alloc(0, 8), entry("snapshot", 0, 0)]
    assert len(history_of(snapshot(trace), 0, max_entries=99).events) == 1


def test_time_counts_from_the_first_event() -> None:
    events = history_of(snapshot(alloc(512, 1) + alloc(1024, 1)), 0, max_entries=9).events
    assert [event.time_us for event in events] == [0, 512]


def test_an_older_snapshot_without_times_frames_and_requested_sizes_is_read() -> None:
    old = snapshot([{"action": "alloc", "addr": 512, "size": 100, "stream": 0}])
    old["segments"] = [
        {"address": 512, "total_size": 2048, "blocks": [
            {"size": 512, "state": "active_allocated"},
            {"size": 512, "state": "inactive"},
            {"size": 1024, "state": "active_awaiting_free"},
        ]}
    ]  # fmt: skip
    history = history_of(old, 0, max_entries=99)
    assert history.events[0].frames == ()
    assert [(b.address, b.size) for b in history.live_at_end] == [(512, 512), (1536, 1024)]


def test_what_could_not_be_had_is_an_event_without_an_address() -> None:
    (event,) = history_of(snapshot(out_of_memory(2**34, 2**20)), 0, max_entries=9).events
    assert (event.kind, event.size, event.address) == ("oom", 2**34, 0)


def test_another_device_is_another_history() -> None:
    second = snapshot(alloc(512, 1), block(512, 512, 1), device=1)
    assert len(history_of(second, 1, max_entries=9).events) == 1
    first = history_of(second, 0, max_entries=9)
    assert (first.events, first.live_at_end) == ([], [])


@pytest.mark.parametrize(("entries", "dropped"), [(2, True), (3, False)])
def test_a_full_buffer_has_lost_its_oldest_events(entries: int, dropped: bool) -> None:
    trace = alloc(512, 1) + alloc(1024, 1)
    assert history_of(snapshot(trace), 0, max_entries=entries).dropped is dropped
