"""A measurement that takes several processes: ranks started by torchrun, and waited for. No torch.

Three things are settled here, before and after the ranks, so that a point with ranks ends as every
other does, in a result:

- Whether the machine can hold the ranks is looked up without starting any: "needs 4 GPUs, 1 found"
  costs no torchrun.
- A rank that dies leaves others waiting for its messages. torchrun ends them as soon as it sees the
  death; a rank that is alive but stuck is given up by the process group's timeout, and a job in
  which nobody moves by a deadline. The result then names the rank and the last line of its
  traceback. A rank leaves a note of its own before it goes, dated to the nanosecond, because the
  error that others then meet (a closed connection) is a consequence; one that was killed could
  leave none, so torchrun's list of exit codes is read first.
- An interrupt reaches every process and leaves no result.

The lock on the device is held here and not by the ranks, which are one measurement together. On
several nodes each runs this; the result is written by the node that has rank 0, a failure by the
node that sees it first.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from typing import IO, Any

from lmlab.jobs.job import SIGNAL_BASE, watching_for_signals
from lmlab.jobs.outcome import CRASHES, killed_by
from lmlab.jobs.registry import RANK_RUNNER
from lmlab.measure import warm_start
from lmlab.measure.exclusive import exclusive
from lmlab.measure.identity import Machine, find_machine
from lmlab.measure.warm_start.client import SignalRelay
from lmlab.measure.warm_start.processes import die_with_parent, kill_family
from lmlab.study.points import Point
from lmlab.study.results import read

TORCHRUN = "torchrun"
RECORDER = "lmlab.jobs.unmeasured"
COLLECTIVE_TIMEOUT_S = 45.0
"""How long a rank waits for the others: a stuck job ends within a minute."""
START_ALLOWANCE_S = 90.0
"""For starting Python, torch and CUDA in every rank, and making what is measured."""
_TAIL_LINES = 400
_TORCHRUNS_PATIENCE = timedelta(seconds=10)
_FAILURE = re.compile(
    r"^ *time *: (\S+)\n *host *: .*\n *rank *: (\d+) .*\n *exitcode *: (-?\d+)", re.MULTILINE
)

Note = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class JobEnd:
    """How a torchrun ended."""

    status: int | None
    """Exit status; None when it was killed at its deadline."""
    last_words: str
    """The end of what it and its ranks wrote to the error stream."""


def torchrun_words(world_size: int, ranks: Mapping[str, Any]) -> list[str]:
    """The torchrun command for a world of that size, as `ranks` of the configuration wants it."""
    nnodes = int(ranks["nnodes"])
    words = [TORCHRUN, "--nnodes", str(nnodes), "--nproc-per-node", str(world_size // nnodes)]
    if nnodes == 1:
        # By address: looking up a machine's own name can take half a minute without a name server.
        return [*words, "--standalone", "--local-addr", "127.0.0.1"]
    endpoint = str(ranks["rdzv_endpoint"])
    return [*words, "--rdzv-backend", str(ranks["rdzv_backend"]), "--rdzv-endpoint", endpoint]


def why_not_here(point: Point, machine: Machine, cores: int | None = None) -> str | None:
    """What this machine lacks for the point's ranks, found without starting them."""
    here = ranks_here(point)
    placement = point.parameters["placement"]
    if placement == "own_gpu" and here > machine.gpu_count:
        return f"needs {_count(here, 'GPU')}, {machine.gpu_count} found"
    if placement == "shared_gpu" and machine.gpu_count == 0:
        return "needs 1 GPU, 0 found"
    found = usable_cores() if cores is None else cores
    if placement == "cpu" and here > found:
        return f"needs {_count(here, 'CPU core')}, {found} found"
    return None


def ranks_here(point: Point) -> int:
    """How many of the point's ranks run on one node."""
    world_size, nnodes = int(point.parameters["world_size"]), int(point.settings["nnodes"])
    if world_size % nnodes:
        raise ValueError(f"world_size = {world_size} cannot be spread evenly over {nnodes} nodes")
    return world_size // nnodes


def run_ranks(point: Point, machine: str, out: Path, torchrun: Sequence[str]) -> int:
    """Measure the point with as many processes as it asks for; the exit status for a shell."""
    here = find_machine()
    _check_call(here, machine, torchrun)
    if reason := why_not_here(point, here):
        return _record(point, out, "unsupported", reason)
    written_before = _written_at(out)
    with exclusive(here.device), tempfile.TemporaryDirectory() as notes:
        with watching_for_signals() as interrupted:
            end = run_torchrun(_command(point, out, torchrun, notes), point)
            stopped = interrupted()
        failure = why_it_failed(end, read_notes(Path(notes)), deadline_s(point))
    if _written_at(out) != written_before:  # by a rank, here or on another node
        print(read(out).headline())
        return 0
    if stopped:
        return SIGNAL_BASE - end.status if end.status is not None and end.status < 0 else 1
    if end.status == 0 and point.settings["nnodes"] > 1:
        return 0  # rank 0 runs, and writes, on another node
    return _record(point, out, *failure)


def _check_call(here: Machine, machine: str, torchrun: Sequence[str]) -> None:
    if here.id != machine:
        raise ValueError(f"machine = {machine!r}, but this is {here.id!r}; nothing is measured")
    if list(torchrun[:1]) != [TORCHRUN]:
        raise ValueError(f"command = {' '.join(torchrun)!r}; allowed: {TORCHRUN} and its options")


def _command(point: Point, out: Path, torchrun: Sequence[str], notes: str) -> list[str]:
    """torchrun of this Python, with what each rank runs; its own logs would be left behind."""
    words = ["--point", point.to_json(), "--out", str(out), "--notes", notes]
    return [
        *(sys.executable, "-m", "torch.distributed.run", *torchrun[1:], "--log-dir", notes),
        *("-m", RANK_RUNNER, *words, "--timeout-s", f"{COLLECTIVE_TIMEOUT_S:g}"),
    ]


def deadline_s(point: Point) -> float:
    """When a job is given up: twice the time that measuring may take, and the ranks' start."""
    return START_ALLOWANCE_S + 2 * float(point.settings["time_cap_s"])


def run_torchrun(command: Sequence[str], point: Point) -> JobEnd:
    """Run a command and all it starts to their end, or until the point's deadline."""
    tail: deque[str] = deque(maxlen=_TAIL_LINES)
    tie = partial(die_with_parent, os.getpid()) if sys.platform == "linux" else None
    with SignalRelay() as relay:
        process = subprocess.Popen(
            command,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            preexec_fn=tie,  # no thread runs yet
            env={**os.environ, **rank_environment(point)},
        )
        relay.aim(process.pid)
        assert process.stderr is not None
        listener = threading.Thread(target=_pass_on, args=(process.stderr, tail), daemon=True)
        listener.start()
        try:
            status: int | None = process.wait(timeout=deadline_s(point))
        except subprocess.TimeoutExpired:
            status = None
        finally:
            kill_family(process.pid)
            process.wait()
    listener.join(timeout=5)
    return JobEnd(status=status, last_words="".join(tail))


def rank_environment(point: Point) -> dict[str, str]:
    """Threads so that the ranks of a node share its cores, and loopback where they share it."""
    threads = max(1, usable_cores() // ranks_here(point))
    variables = {"OMP_NUM_THREADS": str(threads)}
    if point.settings["nnodes"] == 1 and sys.platform == "linux":
        variables["GLOO_SOCKET_IFNAME"] = "lo"
    return variables


def usable_cores() -> int:
    """Cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def why_it_failed(end: JobEnd, notes: Sequence[Note], deadline: float) -> tuple[str, str]:
    """Status and reason of a job that wrote no result."""
    for rank, number in crashed_ranks(end.last_words).items():
        return "failed", f"rank {rank}: {killed_by(number).reason}"
    if notes:
        first = notes[0]
        named = "" if first["status"] == "unsupported" else f"rank {first['rank']}: "
        return first["status"], f"{named}{first['reason']}"
    if end.status is None:
        return "failed", f"no result after {deadline:g} s, so its ranks were killed"
    lines = end.last_words.strip().splitlines()
    said = f": {lines[-1]}" if lines else ""
    return "failed", f"torchrun ended with status {end.status} and no result{said}"


def crashed_ranks(last_words: str) -> dict[int, int]:
    """Rank to the signal it died of, from the list of failures that torchrun ends with.

    A rank that does not heed torchrun's SIGTERM is killed half a minute later: a death that long
    after the first failure is torchrun's doing.
    """
    failures = [
        (datetime.strptime(when, "%Y-%m-%d_%H:%M:%S"), int(rank), -int(code))
        for when, rank, code in _FAILURE.findall(last_words)
    ]
    if not failures:
        return {}
    late = min(failures)[0] + _TORCHRUNS_PATIENCE
    return {rank: number for when, rank, number in failures if number in CRASHES and when < late}


def read_notes(folder: Path) -> list[Note]:
    """What ranks wrote before they gave up, the first of them first."""
    notes = [json.loads(file.read_text()) for file in folder.glob("rank-*.json")]
    return sorted(notes, key=lambda note: int(note["at_ns"]))


def _record(point: Point, out: Path, status: str, reason: str) -> int:
    """Write a result without numbers; in a warm process, since versions come from torch."""
    words = ["--point", point.to_json(), "--out", str(out)]
    code = warm_start.run(RECORDER, [*words, "--status", status, "--reason", reason])
    return code if code >= 0 else SIGNAL_BASE - code


def _pass_on(stream: IO[str], tail: deque[str]) -> None:
    for line in stream:
        tail.append(line)
        sys.stderr.write(line)
    sys.stderr.flush()


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _written_at(path: Path) -> int | None:
    return path.stat().st_mtime_ns if path.exists() else None
