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


STRANGE = {
    "no list of devices": ({"device_traces": 5, "segments": []}, "not as torch writes a snapshot"),
    "a segment without a place": (
        {"device_traces": [[]], "segments": [{}]},
        "not as torch writes a snapshot (KeyError: 'address')",
    ),
    "no such device": ({"device_traces": [], "segments": []}, "device = 0; the file holds 0"),
}


@pytest.mark.parametrize(("kept", "message"), STRANGE.values(), ids=STRANGE)
def test_plain_values_of_another_shape_are_one_line(
    kept: object, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "x").write_bytes(pickle.dumps(kept))
    assert main([str(tmp_path / "x")]) == 2
    assert f"x: {message}" in capsys.readouterr().err


@pytest.mark.parametrize("device", ["1", "-1"])
def test_a_device_that_the_file_does_not_hold_is_refused(
    device: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "x").write_bytes(pickle.dumps(snapshot(alloc(0, MIB), block(0, MIB, MIB))))
    assert main([str(tmp_path / "x"), "--device", device]) == 2
    error = capsys.readouterr().err
    assert error.endswith(f"x: device = {device}; the file holds 1, from 0 on\n")
