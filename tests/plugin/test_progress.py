"""Progress says which point, how many are left and about how long, and what the last one gave."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from lmlab.study.results import Result
from snakemake_logger_plugin_lmlab.display import CLEAR_LINE, Display
from snakemake_logger_plugin_lmlab.progress import Progress, describe, duration, outcome
from tests.study.test_results import make


class Clock:
    """A clock that moves when told to."""

    def __init__(self) -> None:
        self.time = 0.0

    def __call__(self) -> float:
        return self.time


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def progress(clock: Clock) -> Progress:
    progress = Progress(clock)
    progress.expect({"end_to_end": 3, "writeup": 1, "total": 4})
    return progress


POINT = {"machine": "cpu-test", "point": "size~small/context~128"}


def test_a_point_is_named_as_the_study_names_it() -> None:
    assert describe("end_to_end", POINT) == "end_to_end size=small context=128"


def test_a_finished_point_says_what_it_gave_and_what_is_left(
    progress: Progress, clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    make().write(Path("results/cpu-test/point.json"))
    assert progress.start(7, "end_to_end", POINT, ["results/cpu-test/point.json"]) == (
        "[1/4] end_to_end size=small context=128 ..."
    )
    clock.time = 4.0
    assert progress.finish(7) == (
        "[1/4] end_to_end size=small context=128: forward 2 ms, in 4.0 s; 3 left, about 12 s"
    )


ARMS = {
    "naive": {"status": "ok", "reason": None},
    "mine": {"status": "failed", "reason": "NameError: name 'q' is not defined"},
    "flash": {"status": "unsupported", "reason": "needs a GPU"},
    "flex": {"status": "capped", "reason": "would take about 51 s"},
}
GAVE = {
    "an arm broke": (
        make(data={"arms": ARMS}),
        f"forward 2 ms, mine: failed: {ARMS['mine']['reason']}",
    ),
    "all arms broke, as the reason says": (
        make(
            status="failed",
            reason="mine: NameError",
            measurements={},
            data={"arms": {"mine": ARMS["mine"]}},
        ),
        "failed: mine: NameError",
    ),
}


@pytest.mark.parametrize(("result", "words"), GAVE.values(), ids=GAVE)
def test_an_arm_that_failed_is_told_once(
    result: Result, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result.write(Path("results/cpu-test/point.json"))
    assert outcome(["results/cpu-test/point.json"]) == words


def test_time_left_is_counted_rule_by_rule(progress: Progress, clock: Clock) -> None:
    progress.start(1, "writeup", {}, [])
    clock.time = 1.0
    progress.finish(1)
    progress.start(2, "end_to_end", POINT, [])
    clock.time = 101.0
    progress.finish(2)
    assert progress.seconds_left() == pytest.approx(200.0)


def test_points_that_share_an_allocation_share_its_time(progress: Progress, clock: Clock) -> None:
    assert progress.share([1, 2]) == "[0/4] 2 points share an allocation ..."
    for job in (1, 2):
        progress.start(job, "end_to_end", POINT, [])
    clock.time = 10.0
    line = progress.finish(1)
    assert line is not None
    assert line.endswith("in about 5.0 s; 3 left, about 15 s")


def test_the_last_line_leaves_nothing(clock: Clock) -> None:
    progress = Progress(clock)
    progress.expect({"writeup": 1, "total": 1})
    progress.start(1, "writeup", None, ["report/writeup.md"])
    assert progress.finish(1) == "[1/1] writeup: in 0.0 s"


def test_the_end_of_an_unknown_job_is_no_line(progress: Progress) -> None:
    assert progress.finish(99) is None


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.3, "0.3 s"), (12.4, "12 s"), (90, "2 min"), (3600 * 2 + 300, "2 h 5 min")],
)
def test_times_are_said_as_people_say_them(seconds: float, words: str) -> None:
    assert duration(seconds) == words


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_log_file_gets_plain_lines() -> None:
    stream = io.StringIO()
    display = Display(stream)
    display.running("point 1 ...")
    display.message("point 1 done")
    display.end()
    assert stream.getvalue() == "point 1 done\n"


def test_a_terminal_keeps_the_running_point_on_its_last_line() -> None:
    stream = Terminal()
    display = Display(stream)
    display.running("point 1 ...")
    display.message("a warning")
    assert stream.getvalue().endswith(f"{CLEAR_LINE}a warning\npoint 1 ...")
