"""`lmlab status`: every point in a line, a summary last; readers that have seen enough."""

import os
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from lmlab.cli import main
from lmlab.measure import records
from lmlab.measure.identity import find_machine
from lmlab.study.results import read
from tests.jobs.test_staleness import POINT, current
from tests.processes import LMLAB

Lines = Callable[..., list[str]]

NANO = ["status", "--config", "study=nano"]
MACHINE = find_machine().id


@pytest.fixture
def lines(capsys: pytest.CaptureFixture[str]) -> Lines:
    """The lines that `lmlab status` prints for what lies in ./results."""

    def lines(*more: str) -> list[str]:
        assert main([*NANO, *more]) == 0
        return capsys.readouterr().out.splitlines()

    return lines


def write(machine: str = MACHINE, **changes: Any) -> Path:
    """A result of the point, as if measured here and now unless changed."""
    path = POINT.path(Path("results"), machine)
    versions = {"python": "3.11.0", "torch": version("torch"), "lmlab": "0.1.0"}
    own = {"machine": {"id": machine, "device": "cpu", "name": "Test"}, "versions": versions}
    current(**{**own, **changes}).write(path)
    return path


def line_of(lines: list[str]) -> str:
    [line] = [line for line in lines if "topic=accumulation" in line]
    return line


def test_without_results_every_point_is_missing(lines: Lines) -> None:
    found = lines()
    assert all(line.startswith("missing") for line in found[:-2])
    assert found[-1] == f"nano on {MACHINE}: {len(found) - 2} points: {len(found) - 2} missing"


def test_remarks_are_in_the_line_and_counted_in_the_summary(lines: Lines) -> None:
    failed = records.without_value("time", "failed", "off", variant="mine")
    write(measurements=(failed,), code_fingerprint="0" * 16)
    found = lines()
    start = "ok          precision topic=accumulation"
    assert line_of(found) == f"{start}: mine: off; stale: code changed"
    assert found[-1].endswith(", 1 ok; 1 with failed variants; 1 stale (code changed)")


@pytest.mark.parametrize("text", ["{", '{"schema_version": 1}'], ids=["damaged", "schema 1"])
def test_a_file_that_is_not_read_is_listed_and_not_fatal(lines: Lines, text: str) -> None:
    write().write_text(text)
    assert line_of(lines()).startswith("unreadable")


def test_results_of_another_machine_are_read_on_request(lines: Lines) -> None:
    write(machine="cpu-elsewhere", versions={"python": "3", "torch": "1.0", "lmlab": "0"})
    assert line_of(lines()).startswith("missing")
    found = lines("--machine", "cpu-elsewhere")
    assert line_of(found) == "ok          precision topic=accumulation"
    assert found[-1].startswith("nano on cpu-elsewhere:")


def test_another_gpu_has_results_of_the_full_study(capsys: pytest.CaptureFixture[str]) -> None:
    Path("results/nvidia-z9000").mkdir(parents=True)
    assert main(["status", "--machine", "nvidia-z9000"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("full on nvidia-z9000: ")


def test_a_folder_that_is_not_there_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["status", "--results", "nowhere"])
    assert "'nowhere' is not a folder" in capsys.readouterr().err


def test_status_needs_no_torch() -> None:
    program = f"import sys; from lmlab.cli import main; main({NANO}); exit('torch' in sys.modules)"
    command = [sys.executable, "-c", program]
    assert subprocess.run(command, stdout=subprocess.DEVNULL, check=False).returncode == 0


BY_SIGPIPE = 141


def run_without_a_reader(*words: str) -> subprocess.CompletedProcess[str]:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        return subprocess.run(
            [*LMLAB, *words], stdout=writer, stderr=subprocess.PIPE, text=True, check=False
        )
    finally:
        os.close(writer)


@pytest.mark.slow
def test_a_reader_that_left_ends_the_command_quietly() -> None:
    done = run_without_a_reader(*NANO)
    assert (done.returncode, done.stderr) == (BY_SIGPIPE, "")
    assert run_without_a_reader("measure", "--help").stderr == ""


@pytest.mark.slow
def test_a_result_is_written_though_nobody_reads_it(tmp_path: Path) -> None:
    words = ["precision", "topic=accumulation", "--out", "mine.json", *NANO[1:]]
    done = run_without_a_reader("measure", *words)
    # Other tests measure too, and measurements wait for each other.
    said = [line for line in done.stderr.splitlines() if not line.startswith("waiting for another")]
    assert (done.returncode, said) == (BY_SIGPIPE, [])
    assert read(tmp_path / "mine.json").status == "ok"
