"""Snapshots become histories, and a pickle is read without executing what it names."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest

from lmlab.measure.memory.history import History
from lmlab.measure.memory.snapshot import SnapshotError, history_of, load
from tests.measure.memory.snapshots import alloc, block, entry, frame, free, out_of_memory, snapshot


class Hostile:
    """Runs a command when it is unpickled the ordinary way."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> Any:
        return os.system, (self.command,)


def history(trace: list[dict[str, Any]], **changes: int) -> History:
    return history_of(snapshot(trace), 0, max_entries=changes.get("max_entries", 99))


def test_a_snapshot_is_loaded_unchanged(tmp_path: Path) -> None:
    original = snapshot(alloc(512, 100, frame("model.py")), block(512, 512, 100))
    (tmp_path / "a.pickle").write_bytes(pickle.dumps(original))
    assert load(tmp_path / "a.pickle") == original


def test_a_hostile_pickle_is_refused_and_does_nothing(tmp_path: Path) -> None:
    evidence = tmp_path / "was_here"
    evil = {**snapshot([]), "external_annotations": [Hostile(f"touch {evidence}")]}
    (tmp_path / "evil.pickle").write_bytes(pickle.dumps(evil))
    with pytest.raises(SnapshotError, match=r"names posix\.system"):
        load(tmp_path / "evil.pickle")
    assert not evidence.exists()


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b"not a pickle", id="text"),
        pytest.param(pickle.dumps(snapshot([]))[:-20], id="truncated"),
        pytest.param(pickle.dumps([1, 2]), id="a list"),
        pytest.param(pickle.dumps({"segments": []}), id="half a snapshot"),
    ],
)
def test_anything_else_is_an_error(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(SnapshotError, match="pickle"):
        load(tmp_path / "x")


def test_events_are_allocations_completed_frees_and_failures() -> None:
    segments = [entry("segment_alloc", 0, 2**21), entry("snapshot", 0, 0)]
    trace = [*segments, *alloc(512, 100), *free(512, 100), *out_of_memory(2**34, 2**20)]
    found = [(event.kind, event.size, event.address) for event in history(trace).events]
    assert found == [("alloc", 100, 512), ("free", 100, 512), ("oom", 2**34, 0)]


def test_keys_that_older_versions_lack_are_optional() -> None:
    old = snapshot([{"action": "alloc", "addr": 512, "size": 100, "stream": 0}])
    old["segments"] = [
        {"address": 512, "total_size": 2048, "blocks": [
            {"size": 512, "state": "active_allocated"},
            {"size": 512, "state": "inactive"},
            {"size": 1024, "state": "active_awaiting_free"},
        ]}
    ]  # fmt: skip
    found = history_of(old, 0, max_entries=99)
    assert found.events[0].frames == ()
    assert [(b.address, b.size) for b in found.live_at_end] == [(512, 512), (1536, 1024)]


def test_every_device_has_its_own_history() -> None:
    second = snapshot(alloc(512, 1), block(512, 512, 1), device=1)
    assert len(history_of(second, 1, max_entries=9).events) == 1
    first = history_of(second, 0, max_entries=9)
    assert (first.events, first.live_at_end) == ([], [])


def test_a_full_buffer_has_lost_events() -> None:
    trace = alloc(512, 1) + alloc(1024, 1)
    assert history(trace, max_entries=2).dropped
    assert not history(trace, max_entries=3).dropped
