"""Ranks end in a result however they end: with numbers, with a reason, never with a hang."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lmlab.jobs import launch, record
from lmlab.jobs.launch import run_ranks, run_torchrun, torchrun_command, why_unsupported
from lmlab.measure import warm_start
from lmlab.measure.identity import Machine, find_machine
from lmlab.study.files import ROOT
from lmlab.study.points import Point
from lmlab.study.results import Result, read
from tests.jobs.points import changed
from tests.processes import DEADLINE_S, start_script, wait_until

Measure = Callable[[Point], Result]
RANKS = {"rdzv_backend": "c10d", "rdzv_endpoint": "head:29500"}

# A chapter that ends in the way its point names on its last rank; the others wait for that one.
CHAPTER = """
import ctypes
import os
import signal

import torch
import torch.distributed as dist

from lmlab.jobs.outcome import Outcome


def measure(point, device):
    way = point.settings["way"]
    if dist.get_rank() == dist.get_world_size() - 1:
        if way == "raises":
            raise ValueError("rank one\\nbroke")
        if way == "is killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if way == "hangs":
            open(point.settings["started"], "w")
            mutex = ctypes.create_string_buffer(64)
            for _ in range(2):  # in C, where no handler runs
                ctypes.CDLL(None).pthread_mutex_lock(mutex)
    ranks = torch.full((2,), float(dist.get_rank()), device=device)
    dist.all_reduce(ranks)
    return Outcome(data={"sum": ranks.tolist(), "threads_variable": os.environ["OMP_NUM_THREADS"]})
"""


def point_of(way: str = "ends well", **changes: Any) -> Point:
    parameters = {"placement": "cpu", "world_size": 2}
    settings = {"nnodes": 1, "time_cap_s": 5.0, "way": way, "started": os.devnull}
    return changed("failing", parameters, settings, changes)


@pytest.fixture(scope="session")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    shutil.copytree(ROOT / "src" / "lmlab", folder / "src" / "lmlab")
    shutil.copytree(ROOT / "workflow" / "schemas", folder / "workflow" / "schemas")
    chapter = folder / "src" / "lmlab" / "chapters" / "failing"
    chapter.mkdir()
    (chapter / "__init__.py").touch()
    (chapter / "measure.py").write_text(CHAPTER)
    return folder / "src"


@pytest.fixture
def measure(tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Measure:
    monkeypatch.chdir(tree)
    monkeypatch.setenv("PYTHONPATH", str(tree))
    monkeypatch.setattr(warm_start, "run", lambda module, arguments: record.main(arguments))
    monkeypatch.setattr(launch, "usable_cores", lambda: 2)

    def measure(point: Point) -> Result:
        out = tmp_path / "results" / "point.json"
        assert run_ranks(point, find_machine().id, out, torchrun_command(point, out, RANKS)) == 0
        return read(out)

    return measure


@pytest.mark.parametrize(
    ("point", "gpus", "reason"),
    [
        (point_of(placement="own_gpu", world_size=4), 1, "needs 4 GPUs, 1 found"),
        (point_of(placement="own_gpu", nnodes=2), 1, None),
        (point_of(placement="shared_gpu"), 0, "needs 1 GPU, 0 found"),
        (point_of(placement="shared_gpu"), 1, None),
        (point_of(world_size=6), 1, "needs 6 CPU cores, 4 found"),
        (point_of(world_size=4), 0, None),
    ],
)
def test_what_a_machine_lacks_is_known_before_any_rank_starts(
    point: Point, gpus: int, reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "usable_cores", lambda: 4)
    assert why_unsupported(point, Machine("id", "cuda", "name", gpus)) == reason


@pytest.mark.parametrize(
    ("world_size", "budget_s", "reason"), [(3, 1e12, "needs 3 CPU cores"), (2, 240, "skipped: ")]
)
def test_a_point_that_cannot_be_measured_starts_no_rank(
    measure: Measure, monkeypatch: pytest.MonkeyPatch, world_size: int, budget_s: float, reason: str
) -> None:
    plan = {"began": 1, "study_s": budget_s, "chapters_s": {}}
    monkeypatch.setenv("LMLAB_BUDGET", json.dumps(plan))
    monkeypatch.setattr(launch, "run_torchrun", lambda *_: pytest.fail("no rank may start"))
    result = measure(point_of(world_size=world_size))
    assert (result.status, str(result.reason).startswith(reason)) == ("unsupported", True)


def test_another_machine_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="machine = 'nvidia-z9000'"):
        run_ranks(point_of(), "nvidia-z9000", tmp_path / "x.json", ["torchrun"])


def test_the_environments_torchrun_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program of that name next to this Python is found before any other on the PATH."""
    (tmp_path / "torchrun").write_text('#!/bin/sh\necho "$@" >&2\nexit 3\n')
    (tmp_path / "torchrun").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    command = ["torchrun", "--nnodes", "1", "-m", "some.program"]
    ended = run_torchrun(command, point_of(), tmp_path)
    assert ended == (3, "--nnodes 1 -m some.program\n")


@pytest.mark.parametrize(
    ("way", "reason"),
    [
        ("raises", "rank 1: ValueError: rank one broke"),
        ("is killed", "rank 1: process killed by SIGKILL"),
        ("hangs", r"rank \d: .*[Tt]imed? ?out"),
    ],
)
def test_a_rank_that_fails_ends_the_job_with_its_reason(
    measure: Measure, monkeypatch: pytest.MonkeyPatch, way: str, reason: str
) -> None:
    if way == "hangs":
        monkeypatch.setenv("LMLAB_COLLECTIVE_TIMEOUT_S", "5")  # of those who wait for it
    result = measure(point_of(way))
    assert result.status == "failed"
    assert re.match(reason, str(result.reason)), result.reason


def test_one_of_two_nodes_writes_the_result(tree: Path, tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    point, out = point_of(nnodes=2), tmp_path / "point.json"
    command = torchrun_command(point, out, {**RANKS, "rdzv_endpoint": f"localhost:{port}"})
    nodes = []
    for node in "ab":
        own = {"LMLAB_LOCK_DOMAIN": f"{tmp_path.name}{node}", "PYTHONPATH": str(tree)}
        nodes.append(start_script("ranks.py", point, out, "--", *command, cwd=tree, env=own))
    errors = [node.communicate(timeout=DEADLINE_S)[1] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], errors
    result = read(out)
    assert result.data["sum"] == [1.0, 1.0]
    threads = result.data["ranks"].pop("threads")
    assert result.data["threads_variable"] == str(threads)
    assert result.data["ranks"] == {
        **{"backend": "gloo", "world_size": 2, "device": "cpu", "gpus": 0, "nnodes": 2}
    }


def test_a_job_in_which_nothing_moves_is_killed_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    point, ready = point_of(), tmp_path / "ready"

    def after_its_start(point: Point) -> float:
        wait_until(ready.exists)
        return 0.1

    monkeypatch.setattr(launch, "deadline_s", after_its_start)
    program = ["sh", "-c", f"touch {ready}; sleep 601.125; echo no"]
    assert run_torchrun(program, point, tmp_path)[0] is None
    left = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    assert "sleep 601.125" not in left


def test_an_interrupt_ends_ranks_that_hang_in_one_line(tree: Path, tmp_path: Path) -> None:
    out = tmp_path / "point.json"
    point = point_of("hangs", world_size=1, started=str(tmp_path / "started"))
    own = {"LMLAB_LOCK_DOMAIN": tmp_path.name, "PYTHONPATH": str(tree)}
    command = torchrun_command(point, out, RANKS)
    script = start_script("ranks.py", point, out, "--", *command, cwd=tree, env=own)
    wait_until((tmp_path / "started").exists)
    script.send_signal(signal.SIGINT)
    _, stderr = script.communicate()
    assert script.returncode == 130
    assert "Traceback" not in stderr
    assert stderr.splitlines()[-1] == "interrupted, nothing is written"
    assert not out.exists()


def summary(*failures: tuple[str, int, int]) -> str:
    blocks = [
        f"[{index}]:\n  time      : 2026-01-01_{when}\n  host      : here\n"
        f"  rank      : {rank} (local_rank: {rank})\n  exitcode  : {code} (pid: 7)\n"
        "  error_file: <N/A>\n"
        for index, (when, rank, code) in enumerate(failures)
    ]
    return "Root Cause (first observed failure):\n" + "".join(blocks)


ERROR = "rank 1: ValueError: broke"
KILLED_BY_TORCHRUN = summary(("10:00:00", 1, 1), ("10:00:31", 0, -9))


@pytest.mark.parametrize(
    ("status", "stderr", "with_errors", "reason"),
    [
        pytest.param(1, summary(("10:00:00", 0, -15)), True, ERROR, id="first error"),
        pytest.param(1, KILLED_BY_TORCHRUN, True, ERROR, id="killed by torchrun"),
        pytest.param(1, summary(("10:00:00", 2, -9)), True, "rank 2: .* SIGKILL", id="killed"),
        pytest.param(3, "one\nport taken\n", False, ".* status 3 .*: port taken", id="no rank"),
        pytest.param(3, "", False, ".* status 3 and no result", id="no message"),
        pytest.param(None, "", False, "no result after 9 s", id="deadline"),
    ],
)
def test_the_reason_of_a_failure(
    tmp_path: Path, status: int | None, stderr: str, with_errors: bool, reason: str
) -> None:
    """A crash is found in torchrun's list, then the first of the error files counts."""
    for rank, at_ns, text in ((0, 20, "connection closed"), (1, 10, "ValueError: broke")):
        error = {"rank": rank, "at_ns": at_ns, "status": "failed", "reason": text}
        (tmp_path / f"rank-{rank}.json").write_text(json.dumps(error))
    errors = launch.read_errors(tmp_path) if with_errors else []
    found_status, found = launch.why_it_failed(status, stderr, errors, 9)
    assert found_status == "failed"
    assert re.match(reason, found), found
