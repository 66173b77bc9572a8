"""A result in two halves: what the process measured, and what nsys's report adds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from lmlab.chapters.profile.nsys_result import complete
from lmlab.measure.trace.frames import TraceError
from lmlab.study.results import Result, ResultError, read
from tests.measure.trace.three_modes import write_export

MEASURED = Result(
    chapter="profile",
    parameters={"size": "small"},
    settings={},
    status="ok",
    machine={"id": "nvidia-x", "device": "cuda", "name": "X"},
    versions={"python": "3.12", "torch": "2.11", "lmlab": "0.1.0"},
    commit={"id": None, "dirty": False},
    code_fingerprint="0" * 16,
    started_at="2026-01-01T00:00:00Z",
    elapsed_s=1.0,
    data={"tf32": False, "tool_note": None},
)


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    MEASURED.write(tmp_path / "measured.json")
    write_export(tmp_path / "report.sqlite")
    return {
        "measured": tmp_path / "measured.json",
        "export": tmp_path / "report.sqlite",
        "out": tmp_path / "out.json",
    }


def test_the_report_is_added_to_what_the_process_measured(files: dict[str, Path]) -> None:
    complete(**files)
    result = read(files["out"])
    assert result.data["tf32"] is False
    assert result.data["tool"].startswith("nsys ")
    assert list(result.data["modes"]) == ["forward", "forward_backward", "train_step"]
    assert result.code_fingerprint == MEASURED.code_fingerprint


def test_a_point_without_numbers_needs_no_report(files: dict[str, Path]) -> None:
    replace(MEASURED, status="oom", reason="asked for 9 GiB").write(files["measured"])
    files["export"].unlink()
    assert complete(**files) == "oom: asked for 9 GiB"
    assert read(files["out"]).status == "oom"


def test_a_missing_export_is_one_line_and_no_result(files: dict[str, Path]) -> None:
    files["export"].unlink()
    with pytest.raises(TraceError, match="does not exist"):
        complete(**files)
    assert not files["out"].exists()


def test_a_process_that_wrote_nothing_is_one_line(files: dict[str, Path]) -> None:
    files["measured"].unlink()
    with pytest.raises(ResultError, match="not a readable JSON file"):
        complete(**files)
