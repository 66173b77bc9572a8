"""Snapshots become histories, and a pickle is read without executing what it names."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest

from lmlab.measure.memory.__main__ import main
from lmlab.measure.memory.snapshot import SnapshotError, history_of, load
from tests.measure.memory.snapshots import alloc, block, entry, frame, free, out_of_memory, snapshot

MIB = 2**20
SNAPSHOT = snapshot(
    alloc(0, 2 * MIB, frame("lmlab/model/layers.py", 55)) + alloc(2 * MIB, MIB),
    block(0, 2 * MIB, 2 * MIB),
    block(2 * MIB, MIB, MIB),
)


class Hostile:
    """Runs a command when it is unpickled the ordinary way."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> Any:
        return os.system, (self.command,)


def test_a_hostile_pickle_is_refused_and_does_nothing(tmp_path: Path) -> None:
    evidence = tmp_path / "was_here"
    evil = {**SNAPSHOT, "external_annotations": [Hostile(f"touch {evidence}")]}
    (tmp_path / "evil.pickle").write_bytes(pickle.dumps(evil))
    with pytest.raises(SnapshotError, match=r"names posix\.system"):
        load(tmp_path / "evil.pickle")
    assert not evidence.exists()


def test_the_peak_of_a_saved_snapshot_and_its_lines_are_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "step.pickle").write_bytes(pickle.dumps(SNAPSHOT))
    assert main([str(tmp_path / "step.pickle")]) == 0
    first, *lines = capsys.readouterr().out.splitlines()
    assert first.startswith("3.0 MiB at event 2 of 2")
    assert [line.split(maxsplit=2) for line in lines] == [
        ["2.0", "MiB", "lmlab/model/layers.py:55"],
        ["1.0", "MiB", "no source"],
    ]


WRONG: dict[str, Any] = {
    "no file": None,
    "text": b"hello",
    "truncated": pickle.dumps(SNAPSHOT)[:-20],
    "a list": [1, 2],
    "half a snapshot": {"segments": []},
    "no devices": {"device_traces": 5, "segments": []},
    "no address": {"device_traces": [[]], "segments": [{}]},
}


@pytest.mark.parametrize(
    ("content", "arguments"),
    [*((each, []) for each in WRONG.values()), *((SNAPSHOT, ["--device", n]) for n in ("1", "-1"))],
)
def test_anything_else_is_one_line(
    content: Any, arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "x"
    if content is not None:
        file.write_bytes(content if isinstance(content, bytes) else pickle.dumps(content))
    assert main([str(file), *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"{file}: ")
    assert error.count("\n") == 1


def test_events_are_allocations_completed_frees_and_failures() -> None:
    segments = [entry("segment_alloc", 0, 2**21), entry("snapshot", 0, 0)]
    trace = [*segments, *alloc(512, 100), *free(512, 100), *out_of_memory(2**34, 2**20)]
    found = history_of(snapshot(trace), 0, max_entries=7)
    assert [(event.kind, event.size, event.address) for event in found.events] == [
        *(("alloc", 100, 512), ("free", 100, 512), ("oom", 2**34, 0))
    ]
    assert not found.dropped
    assert history_of(snapshot(trace), 0, max_entries=6).dropped, "a full buffer has lost events"


def test_keys_that_older_versions_lack_are_optional_and_devices_are_apart() -> None:
    old = snapshot([{"action": "alloc", "addr": 512, "size": 100, "stream": 0}], device=1)
    states = [("active_allocated", 512), ("inactive", 512), ("active_awaiting_free", 1024)]
    blocks = [{"size": size, "state": state} for state, size in states]
    old["segments"] = [{"device": 1, "address": 512, "total_size": 2048, "blocks": blocks}]
    first, second = (history_of(old, device, max_entries=99) for device in (0, 1))
    assert second.events[0].frames == ()
    assert [(b.address, b.size) for b in second.live_at_end] == [(512, 512), (1536, 1024)]
    assert (first.events, first.live_at_end) == ([], [])
