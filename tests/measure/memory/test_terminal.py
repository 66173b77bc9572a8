"""A kept snapshot told in a terminal."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from lmlab.measure.memory.__main__ import main
from tests.measure.memory.snapshots import alloc, block, frame, snapshot

MIB = 2**20


def test_peak_and_lines_are_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept = snapshot(
        alloc(0, 2 * MIB, frame("lmlab/model/layers.py", 55)) + alloc(2 * MIB, MIB),
        block(0, 2 * MIB, 2 * MIB),
        block(2 * MIB, MIB, MIB),
    )
    (tmp_path / "step.pickle").write_bytes(pickle.dumps(kept))
    assert main([str(tmp_path / "step.pickle")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "3.0 MiB at event 2 of 2, 2 pieces"
    assert [line.split() for line in lines[1:]] == [
        ["2.0", "MiB", "lmlab/model/layers.py:55"],
        ["1.0", "MiB", "no", "line", "of", "the", "program"],
    ]


def test_a_file_that_is_no_snapshot_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "x").write_text("hello")
    assert main([str(tmp_path / "x")]) == 2
    assert "x: not a readable pickle" in capsys.readouterr().err
    assert main([str(tmp_path / "nowhere")]) == 2
