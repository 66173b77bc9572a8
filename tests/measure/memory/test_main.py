"""`python -m lmlab.measure.memory` prints a saved snapshot."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from lmlab.measure.memory.__main__ import main
from tests.measure.memory.snapshots import alloc, block, frame, snapshot

MIB = 2**20
SNAPSHOT = snapshot(
    alloc(0, 2 * MIB, frame("lmlab/model/layers.py", 55)) + alloc(2 * MIB, MIB),
    block(0, 2 * MIB, 2 * MIB),
    block(2 * MIB, MIB, MIB),
)


def test_the_peak_and_its_lines_are_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "step.pickle").write_bytes(pickle.dumps(SNAPSHOT))
    assert main([str(tmp_path / "step.pickle")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "3.0 MiB at event 2 of 2, 2 blocks"
    assert [line.split(maxsplit=2) for line in lines[1:]] == [
        ["2.0", "MiB", "lmlab/model/layers.py:55"],
        ["1.0", "MiB", "no source"],
    ]


@pytest.mark.parametrize(
    ("content", "arguments"),
    [
        pytest.param(None, [], id="no file"),
        pytest.param(b"hello", [], id="no pickle"),
        pytest.param(pickle.dumps({"device_traces": 5, "segments": []}), [], id="no devices"),
        pytest.param(pickle.dumps({"device_traces": [[]], "segments": [{}]}), [], id="no address"),
        pytest.param(pickle.dumps(SNAPSHOT), ["--device", "1"], id="no such device"),
        pytest.param(pickle.dumps(SNAPSHOT), ["--device", "-1"], id="negative device"),
    ],
)
def test_anything_else_is_a_one_line_error(
    content: bytes | None,
    arguments: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "x"
    if content is not None:
        file.write_bytes(content)
    assert main([str(file), *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"{file}: ")
    assert error.count("\n") == 1
