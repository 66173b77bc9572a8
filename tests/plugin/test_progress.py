"""Progress: which point, what it gave, how many are left and about how long."""

import contextlib
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from snakemake_interface_logger_plugins.common import LogEvent

from lmlab.measure import records
from snakemake_logger_plugin_lmlab import LogHandler, duration, stamp
from tests.processes import DEADLINE_S, wait_until
from tests.study.test_results import make

Emit = Callable[..., list[str]]
POINT = {"machine": "cpu-test", "point": "size~small/context~128"}
OUTPUT = "results/cpu-test/point.json"
STARTED: dict[str, Any] = {"jobid": 1, "rule_name": "machine", "wildcards": {}}
MINE = records.without_value("time", "failed", "NameError", variant="mine")


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.3, "0 s"), (12.4, "12 s"), (90, "2 min"), (7500, "2 h 5 min")]
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def job(log: str | None, result: str | None, indent: bool = True) -> dict[str, Any]:
    """A failed job as Snakemake reports it; None for a file that is not there."""
    for path, text in (("point.log", log), ("point.json", result)):
        if text is not None:
            Path(path).write_text(text)
    return {"indent": indent, "log": ["point.log"], "output": ["point.json"]}


@pytest.mark.parametrize(
    ("failed", "to_blame"),
    [
        (("the GPU fell off the bus", None), True),
        (("forward 2 ms", "{}"), False),
        (("", None), False),
        ((None, None), False),
        ((None, None, False), True),
    ],
    ids=["broke", "measured", "an empty log", "not begun", "not of an allocation"],
)
@pytest.mark.parametrize("earlier", [None, "the driver is too old"])
def test_only_the_job_that_broke_is_reported(
    failed: tuple[Any, ...], to_blame: bool, earlier: str | None, emit: Emit
) -> None:
    emit("begins", event=LogEvent.JOB_INFO, **job(earlier, None), **STARTED)
    lines = emit("failed", event=LogEvent.JOB_ERROR, **job(*failed), **STARTED)
    assert bool(lines) is to_blame


@pytest.fixture
def emit(capsys: pytest.CaptureFixture[str]) -> Emit:
    """Gives the handler a message with its fields; returns the lines that it prints."""
    handler = LogHandler(SimpleNamespace(dryrun=False, verbose=False), None)  # type: ignore[arg-type]

    def emit(message: str, **fields: Any) -> list[str]:
        record = logging.LogRecord("snakemake", logging.INFO, "", 0, message, None, None)
        vars(record).update(fields)
        handler.emit(record)
        return capsys.readouterr().err.splitlines()

    return emit


def test_the_handler_prints_points_and_passes_on_the_rest(
    emit: Emit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "monotonic", iter([0.0, 4.0, 5.0, 5.0]).__next__)
    assert emit("stats", event=LogEvent.RUN_INFO, stats={"total": 3}) == ["stats"]
    make(measurements=(*make().measurements, MINE)).write(Path(OUTPUT))
    broken = Path(OUTPUT).with_name("broken.json")
    broken.write_text("{")
    point = "end_to_end size=small context=128: forward 2 ms, mine: NameError"
    jobs = [
        ("end_to_end", POINT, OUTPUT, f"[1/3] {point}; 2 left, about 8 s"),
        ("report", None, "report/writeup.md", "[2/3] report; 1 left, about 2 s"),
        ("memory", {}, broken, f"[3/3] memory: {broken}: not a readable JSON file"),
    ]
    for number, (rule, wildcards, output, expected) in enumerate(jobs):
        started = {"jobid": number, "rule_name": rule, "wildcards": wildcards, "log": []}
        assert emit("ten lines", event=LogEvent.JOB_INFO, output=[output], **started) == []
        [line] = emit("finished", event=LogEvent.JOB_FINISHED, job_id=number)
        assert line.startswith(expected)
    assert emit("finished", event=LogEvent.JOB_FINISHED, job_id=99) == [], "it never started"
    assert emit("Select jobs to execute...") == []
    failed = {"job_error_info": [1, 2], "aux_logs": ["7.log"]}
    lines = emit("two jobs", event=LogEvent.GROUP_ERROR, **failed)
    assert lines == ["An allocation of 2 points failed, see 7.log"]


def test_a_failed_job_is_one_line_with_its_reason_and_not_left(emit: Emit) -> None:
    emit("stats", event=LogEvent.RUN_INFO, stats={"total": 3})
    failed = job("many lines\nresults/x.json: No space left on device\n\n", None, indent=False)
    assert emit("RuleException:\nCalledProcessError in file x, line 3:\nCommand ...") == []
    [line] = emit("ten lines", event=LogEvent.JOB_ERROR, **STARTED, **failed)
    assert line == "machine failed: results/x.json: No space left on device (see point.log)"
    emit("begins", event=LogEvent.JOB_INFO, **{**STARTED, "jobid": 2}, output=[], log=[])
    [line] = emit("finished", event=LogEvent.JOB_FINISHED, job_id=2)
    assert line.startswith("[2/3] machine; 1 left")


SNAKEFILE = """
rule point:
    output: "point.json"
    log: "point.log"
    shell: "( {} ) > {{log}} 2>&1"
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "line"),
    # A shell that waits for a command which ends by itself does not end with an interrupt.
    [
        (": > started; exec sleep 3600", "interrupted; "),
        ("echo too large; false", "point failed: "),
    ],
    ids=["interrupted", "failed"],
)
def test_snakemake_itself_prints_no_more(command: str, line: str) -> None:
    Path("Snakefile").write_text(SNAKEFILE.format(command))
    snakemake = subprocess.Popen(
        [sys.executable, "-m", "snakemake", "--cores", "1", "--logger", "lmlab"],
        stderr=subprocess.PIPE,
        start_new_session=True,
        text=True,
    )
    wait_until(lambda: Path("started").exists() or snakemake.poll() is not None)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(snakemake.pid, signal.SIGINT)  # as a terminal does
    _, stderr = snakemake.communicate(timeout=DEADLINE_S)
    assert snakemake.returncode != 0
    assert any(text.startswith(line) for text in stderr.splitlines()), stderr
    assert "Error in rule" not in stderr
    assert "Command" not in stderr


def test_a_log_that_is_removed_meanwhile_is_no_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "is_file", lambda _: True)
    assert stamp(str(tmp_path / "removed.log")) == (0, 0)
