"""When an allocation breaks, the point that broke it is shown, or the end of its own log."""

from __future__ import annotations

import io
import logging
from pathlib import Path
from types import SimpleNamespace

import pytest
from snakemake_interface_logger_plugins.common import LogEvent

from snakemake_logger_plugin_lmlab import LogHandler
from snakemake_logger_plugin_lmlab.allocation import LAST_LINES, broke, failure
from snakemake_logger_plugin_lmlab.display import Display


def job(name: str, log: str | None, result: str | None) -> dict[str, object]:
    """A job as Snakemake reports it; None for a file that is not there."""
    for path, text in ((Path(f"{name}.log"), log), (Path(f"{name}.json"), result)):
        if text is not None:
            path.write_text(text)
    return {
        "event": LogEvent.JOB_ERROR,
        "indent": True,
        "rule_name": name,
        "log": [f"{name}.log"],
        "output": [f"{name}.json"],
    }


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_point_with_words_in_its_log_and_no_result_broke() -> None:
    assert broke(job("point", "the GPU fell off the bus", None))


@pytest.mark.parametrize(
    ("log", "result"),
    [
        pytest.param("forward 2 ms", "{}", id="measured"),
        pytest.param("", None, id="an empty log, as Snakemake makes one"),
        pytest.param(None, None, id="not begun"),
    ],
)
def test_a_point_that_only_shared_the_allocation_did_not(
    log: str | None, result: str | None
) -> None:
    assert not broke(job("point", log, result))


def test_without_a_point_to_blame_the_end_of_the_allocations_log_is_shown() -> None:
    lines = [f"line {number}" for number in range(20)] + ["CANCELLED DUE TO TIME LIMIT"]
    Path("7.log").write_text("\n".join(lines))
    first, *rest = failure({"job_error_info": [job("a", "", None)], "aux_logs": ["7.log"]}).split(
        "\n"
    )
    assert first == "An allocation of 1 point failed, see 7.log"
    assert rest == [f"    {line}" for line in lines[-LAST_LINES:]]


def test_with_a_point_to_blame_one_line_is_enough() -> None:
    Path("7.log").write_text("line\n")
    jobs = [job("a", "ok", "{}"), job("b", "broken", None)]
    report = failure({"job_error_info": jobs, "aux_logs": ["7.log"]})
    assert report == "An allocation of 2 points failed, see 7.log"


@pytest.fixture
def handler() -> LogHandler:
    made = LogHandler(SimpleNamespace(dryrun=False, verbose=False), None)  # type: ignore[arg-type]
    made.display = Display(io.StringIO())
    return made


def shown(handler: LogHandler) -> str:
    """What a user has seen so far."""
    assert isinstance(handler.display.stream, io.StringIO)
    return handler.display.stream.getvalue()


def emit(handler: LogHandler, message: str, fields: dict[str, object]) -> None:
    record = logging.LogRecord("snakemake", logging.INFO, "", 0, message, None, None)
    vars(record).update(fields)
    handler.emit(record)


def test_of_a_failed_allocation_only_the_point_that_broke_is_reported(
    handler: LogHandler,
) -> None:
    emit(handler, "error in a", job("a", "ok", "{}"))
    emit(handler, "error in b", job("b", "broken", None))
    assert shown(handler) == "error in b\n"


def test_a_failed_job_without_an_allocation_is_always_reported(
    handler: LogHandler,
) -> None:
    emit(handler, "error in a", {**job("a", None, None), "indent": False})
    assert shown(handler) == "error in a\n"


def test_points_that_share_an_allocation_are_announced_without_a_line_each(
    handler: LogHandler,
) -> None:
    jobs = [SimpleNamespace(jobid=1), SimpleNamespace(jobid=2)]
    emit(handler, "Group job points", {"event": LogEvent.GROUP_INFO, "jobs": jobs})
    for each in jobs:
        started = {"jobid": each.jobid, "rule_name": "machine", "wildcards": {}, "output": []}
        emit(handler, "", {"event": LogEvent.JOB_INFO, "indent": True, **started})
    assert shown(handler) == ""
    emit(handler, "", {"event": LogEvent.JOB_FINISHED, "job_id": 1})
    assert "machine: in about 0.0 s" in shown(handler)
