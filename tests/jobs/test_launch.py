"""Ranks end in a result however they end: with numbers, with a reason, never with a hang."""

from __future__ import annotations

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
from lmlab.jobs.launch import (
    TorchrunExit,
    crashed_ranks,
    read_errors,
    run_ranks,
    run_torchrun,
    torchrun_command,
    why_it_failed,
    why_unsupported,
)
from lmlab.measure import warm_start
from lmlab.measure.identity import Machine, find_machine
from lmlab.study.files import ROOT
from lmlab.study.points import Point
from lmlab.study.results import Result, read

RANKS = {"rdzv_backend": "c10d", "rdzv_endpoint": "head:29500"}
WITHOUT_GPU = Machine("cpu-a", "cpu", "A", 0)
ONE_GPU = Machine("nvidia-b", "cuda", "B", 1)

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
    return Point(
        "failing",
        {key: changes.get(key, value) for key, value in parameters.items()},
        {key: changes.get(key, value) for key, value in settings.items()},
    )


def script_of(point: Point, out: Path) -> list[str]:
    """The command that precedes torchrun's."""
    script = [sys.executable, str(ROOT / "workflow" / "scripts" / "ranks.py")]
    given = ["--point", point.to_json(), "--machine", find_machine().id, "--out", str(out)]
    return [*script, *given, "--"]


@pytest.fixture(scope="session")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the sources with that chapter in it."""
    folder = tmp_path_factory.mktemp("ranks")
    shutil.copytree(ROOT / "src" / "lmlab", folder / "src" / "lmlab")
    shutil.copytree(ROOT / "workflow" / "schemas", folder / "workflow" / "schemas")
    chapter = folder / "src" / "lmlab" / "chapters" / "failing"
    chapter.mkdir()
    (chapter / "__init__.py").touch()
    (chapter / "measure.py").write_text(CHAPTER)
    return folder / "src"


@pytest.fixture
def measure(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[Point], Result]:
    """Run a point with real ranks and read its result."""
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
    ("nnodes", "arguments"),
    [
        (1, "--nnodes 1 --nproc-per-node 4 --standalone --local-addr 127.0.0.1"),
        (2, "--nnodes 2 --nproc-per-node 2 --rdzv-backend c10d --rdzv-endpoint head:29500"),
    ],
    ids=["one node needs no rendezvous", "nodes meet where the configuration says"],
)
def test_the_torchrun_command(nnodes: int, arguments: str) -> None:
    point = point_of(world_size=4, nnodes=nnodes)
    program = ["-m", "lmlab.jobs.ranks", "--point", point.to_json(), "--out", "out.json"]
    assert torchrun_command(point, Path("out.json"), RANKS) == [
        *("torchrun", *arguments.split(), *program)
    ]


@pytest.mark.parametrize(
    ("placement", "world_size", "nnodes", "machine", "reason"),
    [
        ("own_gpu", 4, 1, ONE_GPU, "needs 4 GPUs, 1 found"),
        ("own_gpu", 1, 1, WITHOUT_GPU, "needs 1 GPU, 0 found"),
        ("own_gpu", 2, 2, ONE_GPU, None),
        ("shared_gpu", 2, 1, WITHOUT_GPU, "needs 1 GPU, 0 found"),
        ("shared_gpu", 2, 1, ONE_GPU, None),
        ("cpu", 6, 1, ONE_GPU, "needs 6 CPU cores, 4 found"),
        ("cpu", 4, 1, WITHOUT_GPU, None),
    ],
)
def test_what_a_machine_lacks_is_known_before_any_rank_starts(
    placement: str, world_size: int, nnodes: int, machine: Machine, reason: str | None
) -> None:
    point = point_of(placement=placement, world_size=world_size, nnodes=nnodes)
    assert why_unsupported(point, machine, cores=4) == reason


@pytest.mark.parametrize(
    ("world_size", "deadline", "reason"),
    [(3, "", "needs 3 CPU cores, 2 found"), (2, "1 240", "skipped: ")],
    ids=["too large a world", "the budget is used up"],
)
def test_a_point_that_cannot_be_measured_starts_no_rank(
    measure: Callable[[Point], Result],
    monkeypatch: pytest.MonkeyPatch,
    world_size: int,
    deadline: str,
    reason: str,
) -> None:
    monkeypatch.setenv("LMLAB_DEADLINE", deadline)
    monkeypatch.setattr(launch, "run_torchrun", lambda *_: pytest.fail("no rank may start"))
    result = measure(point_of(world_size=world_size))
    assert result.status == "unsupported"
    assert str(result.reason).startswith(reason)


def test_uneven_nodes_and_another_machine_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="world_size = 3"):
        why_unsupported(point_of(world_size=3, nnodes=2), ONE_GPU)
    with pytest.raises(ValueError, match="machine = 'nvidia-z9000'"):
        run_ranks(point_of(), "nvidia-z9000", tmp_path / "x.json", ["torchrun"])


def test_the_command_runs_as_written_with_this_environments_torchrun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program of that name next to this Python is found before any other on the PATH."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "torchrun").write_text('#!/bin/sh\necho "$@" > "$ARGUMENTS"\nexit 3\n')
    (tmp_path / "bin" / "torchrun").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bin" / "python"))
    monkeypatch.setenv("ARGUMENTS", str(tmp_path / "arguments"))
    command = ["torchrun", "--nnodes", "1", "-m", "some.program", "--out", "here"]
    ended = run_torchrun(command, point_of(), tmp_path, lambda: None)
    assert ended.status == 3
    assert (tmp_path / "arguments").read_text().split() == command[1:]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "reason"),
    [
        ("raises", "rank 1: ValueError: rank one broke"),
        ("is killed", "rank 1: process killed by SIGKILL"),
        ("hangs", r"rank \d: .*[Tt]imed? ?out"),
    ],
)
def test_a_rank_that_fails_ends_the_job_with_its_reason(
    measure: Callable[[Point], Result], monkeypatch: pytest.MonkeyPatch, way: str, reason: str
) -> None:
    if way == "hangs":
        monkeypatch.setenv("LMLAB_COLLECTIVE_TIMEOUT_S", "5")  # of those who wait for it
    result = measure(point_of(way))
    assert result.status == "failed"
    assert re.match(reason, str(result.reason)), result.reason


@pytest.mark.slow
def test_two_nodes_measure_one_point_and_one_of_them_writes_it(tree: Path, tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    point, out = point_of(nnodes=2), tmp_path / "point.json"
    ranks = {**RANKS, "rdzv_endpoint": f"localhost:{port}"}
    command = [*script_of(point, out), *torchrun_command(point, out, ranks)]
    nodes = []
    for node in ("a", "b"):
        own = {"LMLAB_LOCK_DOMAIN": f"{tmp_path.name}{node}", "PYTHONPATH": str(tree)}
        nodes.append(subprocess.Popen(command, cwd=tree, env={**os.environ, **own}))
    assert [node.wait(timeout=120) for node in nodes] == [0, 0]
    result = read(out)
    assert result.data["sum"] == [1.0, 1.0]
    threads = result.data["ranks"].pop("threads")
    assert result.data["threads_variable"] == str(threads)
    assert result.data["ranks"] == {
        **{"backend": "gloo", "world_size": 2, "device": "cpu", "gpus": 0, "nnodes": 2}
    }


def test_a_job_in_which_nothing_moves_is_killed_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wait_for: Callable[[Path], None]
) -> None:
    point, ready = point_of(), tmp_path / "ready"

    def after_its_start(point: Point) -> float:
        wait_for(ready)
        return 0.1

    monkeypatch.setattr(launch, "deadline_s", after_its_start)
    program = ["sh", "-c", f"touch {ready}; sleep 601.125; echo no"]
    assert run_torchrun(program, point, tmp_path, lambda: None).status is None
    left = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    assert "sleep 601.125" not in left


@pytest.mark.slow
def test_an_interrupt_ends_ranks_that_hang_in_one_line(
    tree: Path, tmp_path: Path, wait_for: Callable[[Path], None]
) -> None:
    out = tmp_path / "point.json"
    point = point_of("hangs", world_size=1, started=str(tmp_path / "started"))
    own = {"LMLAB_LOCK_DOMAIN": tmp_path.name, "PYTHONPATH": str(tree)}
    script = subprocess.Popen(
        [*script_of(point, out), *torchrun_command(point, out, RANKS)],
        cwd=tree,
        env={**os.environ, **own},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_for(tmp_path / "started")
    script.send_signal(signal.SIGINT)
    _, stderr = script.communicate()
    assert script.returncode == 130
    assert "Traceback" not in stderr
    assert stderr.splitlines()[-1] == "interrupted, nothing is written"
    assert not out.exists()


def summary(*failures: tuple[str, int, int]) -> str:
    """The list of failures that torchrun prints."""
    blocks = [
        f"[{index}]:\n  time      : 2026-01-01_{when}\n  host      : here\n"
        f"  rank      : {rank} (local_rank: {rank})\n  exitcode  : {code} (pid: 7)\n"
        "  error_file: <N/A>\n"
        for index, (when, rank, code) in enumerate(failures)
    ]
    return "Root Cause (first observed failure):\n" + "".join(blocks)


@pytest.mark.parametrize(
    ("failures", "crashed"),
    [
        ((), {}),
        ((("10:00:00", 0, 1), ("10:00:00", 1, -9)), {1: signal.SIGKILL}),
        ((("10:00:00", 1, 1), ("10:00:00", 0, -15)), {}),
        ((("10:00:00", 1, 1), ("10:00:31", 0, -9)), {}),
        ((("10:00:00", 3, -11),), {3: signal.SIGSEGV}),
    ],
    ids=["nothing said", "killed", "ended by torchrun", "killed by torchrun", "crashed"],
)
def test_who_crashed_is_read_from_torchruns_list_of_failures(
    failures: tuple[tuple[str, int, int], ...], crashed: dict[int, int]
) -> None:
    assert crashed_ranks(summary(*failures)) == crashed


@pytest.mark.parametrize(
    ("ended", "with_errors", "reason"),
    [
        ((1, summary(("10:00:00", 1, 1))), True, "rank 1: ValueError: broke"),
        ((1, summary(("10:00:00", 2, -9))), True, "rank 2: process killed by SIGKILL"),
        (
            (3, "one\nport taken\n"),
            False,
            "torchrun exited with status 3",
        ),
        ((3, ""), False, "torchrun exited with status 3"),
        ((None, ""), False, "no result after 9 s, so its ranks were killed"),
    ],
    ids=["the first error", "a crash before it", "no rank", "nothing said", "killed"],
)
def test_the_reason_of_a_failure(
    tmp_path: Path, ended: tuple[int | None, str], with_errors: bool, reason: str
) -> None:
    for rank, at_ns, text in ((0, 20, "connection closed"), (1, 10, "ValueError: broke")):
        error = {"rank": rank, "at_ns": at_ns, "status": "failed", "reason": text}
        (tmp_path / f"rank-{rank}.json").write_text(json.dumps(error))
    errors = read_errors(tmp_path) if with_errors else []
    found = why_it_failed(TorchrunExit(*ended), errors, 9)
    assert found[0] == "failed"
    assert found[1].startswith(reason)
