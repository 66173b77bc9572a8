"""Progress: which point, what it gave, how many are left and about how long."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from snakemake_interface_logger_plugins.common import LogEvent

from lmlab.measure import records
from snakemake_logger_plugin_lmlab import LogHandler, broke
from snakemake_logger_plugin_lmlab.progress import Progress, duration
from tests.study.test_results import make

POINT = {"machine": "cpu-test", "point": "size~small/context~128"}
OUTPUT = "results/cpu-test/point.json"
MINE = records.without_value("time", "failed", "NameError", variant="mine")


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_finished_point_says_what_it_gave_and_what_is_left() -> None:
    seconds = iter([0.0, 4.0])
    progress = Progress(lambda: next(seconds))
    progress.expected = 4
    make(measurements=(*make().measurements, MINE)).write(Path(OUTPUT))
    progress.start(7, "end_to_end", POINT, [OUTPUT])
    assert progress.finish(7) == (
        "[1/4] end_to_end size=small context=128: forward 2 ms, mine: NameError; 3 left, about 12 s"
    )


def test_other_jobs_and_the_last_one_have_short_lines() -> None:
    progress = Progress()
    progress.expected = 1
    progress.start(1, "report", None, ["report/writeup.md"])
    assert progress.finish(1) == "[1/1] report"
    assert progress.finish(99) == "", "a job that was never started"


def test_a_result_that_cannot_be_read_is_named() -> None:
    Path(OUTPUT).parent.mkdir(parents=True)
    Path(OUTPUT).write_text("{")
    progress = Progress()
    progress.start(1, "end_to_end", POINT, [OUTPUT])
    assert OUTPUT in progress.finish(1)


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
def test_of_a_failed_allocation_only_the_job_that_broke_is_reported(
    failed: tuple[Any, ...], to_blame: bool
) -> None:
    assert broke(job(*failed)) is to_blame


@pytest.fixture
def emit() -> Callable[..., None]:
    """Give the handler a message with its fields."""
    handler = LogHandler(SimpleNamespace(dryrun=False, verbose=False), None)  # type: ignore[arg-type]

    def emit(message: str, **fields: Any) -> None:
        record = logging.LogRecord("snakemake", logging.INFO, "", 0, message, None, None)
        vars(record).update(fields)
        handler.emit(record)

    return emit


def test_the_handler_prints_points_and_passes_on_the_rest(
    emit: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    started = {"jobid": 1, "rule_name": "machine", "wildcards": {}, "output": []}
    emit("stats", event=LogEvent.RUN_INFO, stats={"machine": 1, "total": 1})
    emit("ten lines", event=LogEvent.JOB_INFO, **started)
    emit("finished", event=LogEvent.JOB_FINISHED, job_id=1)
    emit("Select jobs to execute...")
    emit("two jobs", event=LogEvent.GROUP_ERROR, job_error_info=[1, 2], aux_logs=["7.log"])
    assert capsys.readouterr().err.splitlines() == [
        "stats",
        "[1/1] machine",
        "An allocation of 2 points failed, see 7.log",
    ]


def test_an_interrupt_is_one_line_and_the_last(
    emit: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    emit("Terminating processes on user request, this might take some time.")
    emit("Error in rule", event=LogEvent.JOB_ERROR, indent=False)
    emit("At least one job did not complete successfully.")
    assert len(capsys.readouterr().err.splitlines()) == 1
