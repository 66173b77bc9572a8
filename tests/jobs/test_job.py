"""The measuring client: a crash or a hang becomes a result, an interrupt does not."""

import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from unittest.mock import Mock

import pytest

from lmlab.jobs import record
from lmlab.jobs.job import RECORDER, run_as_program, run_job
from lmlab.measure import warm_start
from lmlab.measure.identity import find_machine
from lmlab.measure.warm_start.processes import relay_signals
from lmlab.study.files import ROOT
from lmlab.study.points import Point
from lmlab.study.results import read
from tests.jobs.points import end_to_end_point, precision_point
from tests.processes import LMLAB, start_script, wait_until, warm_helpers

Run = Callable[..., tuple[int, Path]]
Start = Callable[..., subprocess.Popen[str]]
MODEL = """
import ctypes
c = ctypes.CDLL(None)
class Model:
    def __init__(self, **_):
        open("running", "w")
        {call}
"""
# A mutex that is locked twice: no signal handler runs, as in a driver that waits for a GPU.
HANG = "mutex = ctypes.create_string_buffer(64); [c.pthread_mutex_lock(mutex) for _ in 'ab']"


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """Run the client with a stand-in for the job; its status, and where the result would be."""

    def run(job: Callable[[Path], int], point: Point | None = None) -> tuple[int, Path]:
        out = tmp_path / "point.json"

        def start(module: str, arguments: Sequence[str]) -> int:
            return record.main(arguments) if module == RECORDER else job(out)

        monkeypatch.setattr(warm_start, "run", start)
        point = point or precision_point("layernorm")
        return run_job(point, find_machine().id, out), out

    return run


@pytest.fixture(scope="module")
def environment() -> Iterator[dict[str, str]]:
    """These tests share a warm helper."""
    with warm_helpers() as runtime:
        switches = {"LMLAB_RUNTIME_DIR": runtime, "PYTHONPATH": str(ROOT / "src")}
        yield {**switches, "LMLAB_LOCK_DOMAIN": str(os.getpid())}


@pytest.fixture
def start(tmp_path: Path, environment: dict[str, str]) -> Start:
    def start(call: str, **more: str) -> subprocess.Popen[str]:
        (tmp_path / "own.py").write_text(MODEL.format(call=call))
        point, out = end_to_end_point(model="own:Model"), Path("point.json")
        return start_script("measure.py", point, out, cwd=tmp_path, env={**environment, **more})

    return start


@pytest.mark.slow
@pytest.mark.parametrize(
    ("call", "limit_s", "reason"),
    [
        ("c.abort()", "900", "process killed by SIGABRT"),
        (HANG, "1", "no result after 1 s, so it was killed"),
    ],
    ids=["crashes", "hangs"],
)
def test_a_point_that_cannot_record_its_end_is_a_failure(
    tmp_path: Path, start: Start, call: str, limit_s: str, reason: str
) -> None:
    script = start(call, LMLAB_POINT_LIMIT_S=limit_s)
    stdout, stderr = script.communicate()
    assert (script.returncode, stdout) == (0, f"failed: {reason}\n"), stderr
    result = read(tmp_path / "point.json")
    assert (result.status, result.reason) == ("failed", reason)
    assert result.elapsed_s > 0


@pytest.mark.slow
def test_an_interrupt_is_one_line_even_if_the_point_hangs(tmp_path: Path, start: Start) -> None:
    script = start(HANG)
    wait_until((tmp_path / "running").exists)
    script.send_signal(signal.SIGINT)
    stdout, stderr = script.communicate()
    assert (script.returncode, stdout, len(stderr.splitlines())) == (130, "", 1), stderr
    assert not (tmp_path / "point.json").exists()


@pytest.mark.parametrize(
    ("number", "recorded"),
    [(signal.SIGABRT, True), (signal.SIGKILL, True), (signal.SIGTERM, False)],
)
def test_only_a_deadly_signal_is_recorded(run: Run, number: signal.Signals, recorded: bool) -> None:
    status, out = run(lambda _: -number)
    assert status == (0 if recorded else 128 + number)
    assert (number.name in str(read(out).reason)) if recorded else not out.exists()


def test_a_crash_on_the_way_out_of_an_interrupt_leaves_no_result(run: Run) -> None:
    def job(_: Path) -> int:
        with relay_signals():
            signal.raise_signal(signal.SIGTERM)
        return -signal.SIGABRT

    before = signal.signal(signal.SIGTERM, lambda number, frame: None)
    try:
        status, out = run(job)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert status == 128 + signal.SIGTERM
    assert not out.exists()


def test_a_result_written_before_the_crash_is_kept(run: Run) -> None:
    def job(out: Path) -> int:
        out.write_text("written")
        return -signal.SIGSEGV

    status, out = run(job)
    assert (status, out.read_text()) == (0, "written")


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ValueError("machine"), 2),
        (PermissionError(13, "No", "results"), 2),
        (KeyboardInterrupt(), 130),
    ],
)
def test_what_a_user_or_a_disk_does_is_one_line(
    capsys: pytest.CaptureFixture[str], error: BaseException, status: int
) -> None:
    assert run_as_program(Mock(side_effect=error)) == status
    assert len(capsys.readouterr().err.splitlines()) == 1


READS_OUT_OF_BOUNDS = """
import torch

def attend(q, k, v, is_causal):
    return (q + k + v).index_select(0, torch.tensor([q.shape[0]], device=q.device))
"""
BENCHMARK = ["topic=benchmark", "precision=fp32", "head_dim=16", "sequence=64"]


@pytest.mark.gpu
def test_a_lost_context_is_recorded_and_the_next_point_has_a_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel that takes the GPU's context with it costs its own point."""
    (tmp_path / "broken.py").write_text(READS_OUT_OF_BOUNDS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    found = []
    for variant in ("broken:attend", "naive"):
        command = [*LMLAB, "measure", "attention", *BENCHMARK]
        out = tmp_path / "result.json"
        subprocess.run([*command, f"variants={variant}", "--out", str(out)], check=False)
        found.append(json.loads(out.read_text()))
    assert "CUDA error" in json.dumps(found[0])
    assert all(record["status"] == "ok" for record in found[1]["measurements"])
