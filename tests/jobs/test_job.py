"""The measuring client: a crash becomes a result, an interrupt does not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from lmlab.jobs.job import run_job
from lmlab.measure import warm_start
from lmlab.measure.identity import find_machine
from lmlab.study.files import ROOT
from lmlab.study.results import read
from tests.jobs.points import end_to_end_point, precision_point

SCRIPT = ROOT / "workflow" / "scripts" / "measure.py"
POINT = precision_point("layernorm")

CRASHING_MODEL = """
import os
import signal


class Model:
    def __init__(self, **_):
        os.kill(os.getpid(), signal.SIGSEGV)
"""


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., tuple[int, Path]]:
    """Run the client with a stand-in for the job; its status, and where the result would be."""

    def run(job: Callable[..., int]) -> tuple[int, Path]:
        monkeypatch.setattr(warm_start, "run", job)
        out = tmp_path / "point.json"
        return run_job(POINT, find_machine().id, out, cold=False), out

    return run


def test_a_real_crash_is_recorded_as_a_failure(tmp_path: Path) -> None:
    (tmp_path / "crashing.py").write_text(CRASHING_MODEL)
    point = end_to_end_point(model="crashing:Model", start="cold")
    out = tmp_path / "results" / "point.json"
    arguments = ["--point", point.to_json(), "--machine", find_machine().id, "--out", str(out)]
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *arguments],
        cwd=tmp_path,
        env={**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        check=False,
    )
    result = read(out)
    assert done.returncode == 0, done.stderr
    assert result.status == "failed"
    assert result.reason == "process killed by SIGSEGV"
    assert result.parameters == point.parameters
    assert result.elapsed_s > 0
    assert done.stdout.splitlines()[-1] == "failed: process killed by SIGSEGV"


@pytest.mark.parametrize("number", [signal.SIGABRT, signal.SIGKILL])
def test_other_deadly_signals_are_recorded_too(
    run: Callable[..., tuple[int, Path]], number: signal.Signals
) -> None:
    status, out = run(lambda *_, **__: -number)
    assert status == 0
    assert number.name in str(read(out).reason)


def test_a_terminated_job_leaves_no_result(run: Callable[..., tuple[int, Path]]) -> None:
    status, out = run(lambda *_, **__: -signal.SIGTERM)
    assert status == 128 + signal.SIGTERM
    assert not out.exists()


def test_a_crash_on_the_way_out_of_an_interrupt_leaves_no_result(
    run: Callable[..., tuple[int, Path]],
) -> None:
    def job(*_: object, **__: object) -> int:
        os.kill(os.getpid(), signal.SIGTERM)
        return -signal.SIGABRT

    before = signal.signal(signal.SIGTERM, lambda number, frame: None)
    try:
        status, out = run(job)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert status == 128 + signal.SIGABRT
    assert not out.exists()


def test_a_result_written_before_the_crash_is_kept(
    run: Callable[..., tuple[int, Path]], tmp_path: Path
) -> None:
    def job(*_: object, **__: object) -> int:
        (tmp_path / "point.json").write_text("written")
        return -signal.SIGSEGV

    status, out = run(job)
    assert status == 128 + signal.SIGSEGV
    assert out.read_text() == "written"


@pytest.mark.parametrize(("start", "cold"), [("cold", True), ("warm", False)])
def test_a_cold_point_gets_a_fresh_process(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, start: str, cold: bool
) -> None:
    asked: list[bool] = []

    def job(*_: object, cold: bool) -> int:
        asked.append(cold)
        return 0

    monkeypatch.setattr(warm_start, "run", job)
    run_job(end_to_end_point(start=start), "any", tmp_path / "x.json", cold=False)
    assert asked == [cold]
