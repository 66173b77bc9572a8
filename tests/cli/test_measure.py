"""`lmlab measure`: a few keys in, a table and one JSON document out."""

import json
import signal
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest

from lmlab.cli import main, measure
from lmlab.cli.measure import table
from lmlab.jobs import run
from lmlab.jobs.outcome import Outcome, Unsupported
from lmlab.measure import records
from lmlab.study.points import Point
from lmlab.study.results import read
from tests.report.study import time_record
from tests.study.test_results import make

NANO = ["--config", "study=nano"]
COLLECTIVES = ["measure", "collectives", *NANO]


def timed(stopped: str = "3 samples", **labels: str) -> records.Record:
    return {**time_record([1.0, 2.0, 3.0], **labels), "stopped": stopped}


def chapter_giving(outcome: Outcome | BaseException) -> Callable[[str], object]:
    """Stands in for `load`: a chapter that ends in one way."""
    return lambda name: Mock(side_effect=[outcome])


def test_the_last_line_is_the_result_and_the_table_is_above_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    phases = [timed(phase="forward"), timed(phase="total")]
    monkeypatch.setattr(run, "load", chapter_giving(Outcome(measurements=phases)))
    assert main(["measure", "end_to_end", "context=8", *NANO]) == 0
    lines = capsys.readouterr().out.splitlines()
    result = json.loads(lines[-1])
    assert (result["status"], result["parameters"]["context"]) == ("ok", 8)
    assert [line.split()[0] for line in lines[-4:-1]] == ["time", "forward", "total"]
    assert len({len(line) for line in lines[-4:-1]}) == 1, "columns are aligned"
    assert not list(tmp_path.rglob("*.json")), "nothing is written unless asked for"


def test_results_go_where_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["measure", "precision", "topic=accumulation"]
    main([*arguments, "--out", "mine.json", *NANO])
    assert read(tmp_path / "mine.json").parameters == {"topic": "accumulation"}
    capsys.readouterr()
    assert main([*arguments, "--out", str(tmp_path), *NANO]) == 2, "a folder cannot be written"
    captured = capsys.readouterr()
    assert json.loads(captured.out.splitlines()[-1])["status"] == "ok", "and no result is lost"
    assert len(captured.err.splitlines()) == 1


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (RuntimeError("broken"), "failed: RuntimeError: broken"),
        (Unsupported("needs a GPU"), "unsupported: needs a GPU"),
    ],
    ids=["failed", "unsupported"],
)
def test_only_a_failure_fails(
    error: Exception, line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run, "load", chapter_giving(error))
    assert main(["measure", "machine", *NANO]) == (1 if line.startswith("failed") else 0)
    assert line in capsys.readouterr().out.splitlines()


CAPPED = "time cap of 10 s after 1 sample"
ABOVE: dict[str, tuple[list[records.Record], list[str]]] = {
    "all samples": ([timed()], []),
    "capped": ([timed(CAPPED, phase="a"), timed(CAPPED, phase="b")], [f"stopped early: {CAPPED}"]),
    "variants with ends of their own": ([timed(CAPPED, variant="a"), timed(variant="b")], []),
    "a variant without a time": (
        [timed(), records.without_value("time", "failed", "off", variant="mine")],
        ["mine: off"],
    ),
}


@pytest.mark.parametrize(("measurements", "lines"), ABOVE.values(), ids=ABOVE)
def test_what_rows_lack_is_above(measurements: list[records.Record], lines: list[str]) -> None:
    result = make(measurements=tuple(measurements), flags=())
    above = table(Point("attention"), result).splitlines()[2:]
    assert above[: len(lines)] == lines
    assert above[len(lines)].startswith("time ")


def test_ranks_are_started_by_torchrun(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[list[str]] = []

    def stand_in(point: Point, machine: str, out: Path, command: list[str]) -> int:
        asked.append(command)
        make(parameters=point.parameters, chapter=point.chapter).write(out)
        print("headline")
        return 0

    monkeypatch.setattr(measure, "run_ranks", stand_in)
    keys = ["placement=own_gpu", "world_size=4", "nnodes=2"]
    assert main([*COLLECTIVES[:2], *keys, *NANO]) == 0
    assert asked[0][:5] == ["torchrun", "--nnodes", "2", "--nproc-per-node", "2"]
    said = capsys.readouterr()
    assert json.loads(said.out.splitlines()[-1])["parameters"]["world_size"] == 4
    assert ("headline" in said.err, "headline" in said.out) == (True, False)


@pytest.mark.parametrize(
    ("status", "said"), [(128 + signal.SIGINT, "lmlab: interrupted\n"), (128 + signal.SIGTERM, "")]
)
def test_a_signal_that_ended_the_ranks_ends_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], status: int, said: str
) -> None:
    monkeypatch.setattr(measure, "run_ranks", lambda *_: status)
    try:
        ended = main(COLLECTIVES)
    except SystemExit as error:
        ended = int(str(error.code))
    assert (ended, capsys.readouterr().err) == (status, said)


def test_an_interrupt_writes_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(run, "load", chapter_giving(KeyboardInterrupt()))
    assert main(["measure", "machine", "--out", "mine.json", *NANO]) == 130
    assert len(capsys.readouterr().err.splitlines()) == 1
    assert not list(tmp_path.rglob("*.json"))
