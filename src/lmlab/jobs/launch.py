"""Start and supervise torchrun for a measurement with several ranks. No torch.

Whether the machine can hold the ranks is checked before starting any. When a rank dies, torchrun
ends the others; a hanging rank runs into the process group's timeout, a stuck job into a deadline.
Failing ranks write timestamped error files: the first error is the cause, the others (a closed
connection) are consequences. A killed rank cannot write one, so torchrun's own list of exit codes
is read first. An interrupt leaves no result.

The device lock is held here, not by the ranks, which together are one measurement. With several
nodes, each node runs this; the node of rank 0 writes the result, or the first node that notices a
failure writes that.
"""

import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from typing import IO, Any

from lmlab.jobs import budget
from lmlab.jobs.job import SIGNAL_BASE, Job
from lmlab.jobs.outcome import CRASHES, death_reason
from lmlab.jobs.registry import RANK_ERRORS, RANK_RUNNER
from lmlab.measure.exclusive import exclusive
from lmlab.measure.identity import Machine, find_machine
from lmlab.measure.warm_start import processes
from lmlab.study.points import Point
from lmlab.study.results import read
from lmlab.study.selection import machine_of

START_ALLOWANCE_S = 90.0
"""For starting Python, torch and CUDA in every rank, and building what is measured."""
_TAIL_LINES = 400
_OWN_DEATH_WITHIN = timedelta(seconds=10)
_FAILURE = re.compile(
    r"^ *time *: (\S+)\n *host *: .*\n *rank *: (\d+) .*\n *exitcode *: (-?\d+)", re.MULTILINE
)


def torchrun_args(point: Point, ranks: Mapping[str, Any]) -> list[str]:
    """torchrun's options for the ranks of a point; `ranks` is that block of the configuration."""
    nnodes = point.settings["nnodes"]
    size = ["--nnodes", str(nnodes), "--nproc-per-node", str(ranks_per_node(point))]
    if nnodes == 1:
        # By address: looking up a machine's own name can take half a minute without a name server.
        return [*size, "--standalone", "--local-addr", "127.0.0.1"]
    backend, endpoint = ranks["rdzv_backend"], ranks["rdzv_endpoint"]
    return [*size, "--rdzv-backend", backend, "--rdzv-endpoint", endpoint]


def torchrun_command(point: Point, out: Path, ranks: Mapping[str, Any]) -> list[str]:
    """The whole command that measures a point, as the workflow's rule writes it."""
    program = ["-m", RANK_RUNNER, "--point", point.to_json(), "--out", str(out)]
    return ["torchrun", *torchrun_args(point, ranks), *program]


def why_unsupported(point: Point, machine: Machine) -> str | None:
    """Why this machine cannot run the point's ranks, found without starting them."""
    placement = point.parameters["placement"]
    needed = 1 if placement == "shared_gpu" else ranks_per_node(point)
    on_cpu = placement == "cpu"
    unit, found = ("CPU core", usable_cores()) if on_cpu else ("GPU", machine.gpu_count)
    if needed <= found:
        return None
    return f"needs {needed} {unit}{'s' * (needed > 1)}, {found} found"


def ranks_per_node(point: Point) -> int:
    """Ranks per node; a ValueError if the world size is not a multiple of the number of nodes."""
    world_size, nnodes = int(point.parameters["world_size"]), int(point.settings["nnodes"])
    if world_size % nnodes:
        raise ValueError(f"world_size = {world_size}; allowed: multiples of nnodes = {nnodes}")
    return world_size // nnodes


def run_ranks(point: Point, machine: str, out: Path, command: Sequence[str]) -> int:
    """Measure the point with a torchrun command; returns an exit status for a shell."""
    here, job = find_machine(), Job(point, out)
    if here.id != machine_of(machine):
        raise ValueError(f"machine = {machine!r}, but this is {here.id!r}; nothing is measured")
    if reason := why_unsupported(point, here):
        return job.record("unsupported", reason)
    gpus = ranks_per_node(point) if point.parameters["placement"] == "own_gpu" else 1
    with exclusive(here.device, gpus), tempfile.TemporaryDirectory() as errors:
        if reason := budget.why_skipped(point.chapter, out):
            return job.record("unsupported", reason)
        status, stderr = run_torchrun(command, point, Path(errors))
        failure = why_it_failed(status, stderr, read_errors(Path(errors)), deadline_s(point))
    if job.is_written():  # by a rank, here or on another node
        print(read(out).headline())
        return 0
    if processes.relayed:
        return SIGNAL_BASE + processes.relayed[0]
    if status == 0 and point.settings["nnodes"] > 1:
        return 0  # rank 0 runs, and writes, on another node
    return job.record(*failure)


def deadline_s(point: Point) -> float:
    """Seconds until a job is killed: twice the time cap, plus an allowance for starting ranks."""
    return START_ALLOWANCE_S + 2 * float(point.settings["time_cap_s"])


def run_torchrun(command: Sequence[str], point: Point, errors: Path) -> tuple[int | None, str]:
    """Run a command until it exits or the point's deadline passes, then kill whatever it left
    running; returns its status, None if it was killed, and the end of its stderr."""
    tail: deque[str] = deque(maxlen=_TAIL_LINES)
    status: int | None = None
    with processes.relay_signals() as set_target, contextlib.suppress(subprocess.TimeoutExpired):
        process = subprocess.Popen(
            command,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
            # Safe: no thread is running yet.
            preexec_fn=partial(processes.die_with_parent, os.getpid()),
            env={**os.environ, **rank_environment(point, errors)},
        )
        set_target(process.pid)
        copier = threading.Thread(target=_copy_lines, args=(process.stderr, tail), daemon=True)
        try:
            copier.start()
            status = process.wait(timeout=deadline_s(point))
        finally:
            processes.kill_family(process.pid)
            process.wait()
            copier.join(timeout=5)
    return status, "".join(tail)


def rank_environment(point: Point, errors: Path) -> dict[str, str]:
    """Environment of the ranks: our torchrun first, cores shared evenly, loopback on one node."""
    return {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
        "OMP_NUM_THREADS": str(max(1, usable_cores() // ranks_per_node(point))),
        "PET_LOG_DIR": str(errors),  # torchrun would leave its own log folders behind
        RANK_ERRORS: str(errors),
        **({"GLOO_SOCKET_IFNAME": "lo"} if point.settings["nnodes"] == 1 else {}),
    }


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0))


def why_it_failed(
    status: int | None, stderr: str, errors: Sequence[Mapping[str, Any]], deadline: float
) -> tuple[str, str]:
    """Status and reason of a job that wrote no result."""
    if crashed := crashed_ranks(stderr):
        rank, number = next(iter(crashed.items()))
        return "failed", f"rank {rank}: {death_reason(number)}"
    if errors:
        who = "" if errors[0]["status"] == "unsupported" else f"rank {errors[0]['rank']}: "
        return errors[0]["status"], f"{who}{errors[0]['reason']}"
    if status is None:
        return "failed", f"no result after {deadline:g} s, so its ranks were killed"
    last = "".join(f": {line}" for line in stderr.strip().splitlines()[-1:])
    return "failed", f"torchrun exited with status {status} and no result{last}"


def crashed_ranks(stderr: str) -> dict[int, int]:
    """Map each crashed rank to the signal that killed it, from torchrun's final failure list.

    torchrun itself kills ranks that ignore SIGTERM for half a minute, so only deaths soon after
    the first failure count as crashes.
    """
    failures = [
        (datetime.strptime(when, "%Y-%m-%d_%H:%M:%S"), int(rank), -int(code))
        for when, rank, code in _FAILURE.findall(stderr)
    ]
    return {
        rank: number
        for when, rank, number in failures
        if number in CRASHES and when < min(failures)[0] + _OWN_DEATH_WITHIN
    }


def read_errors(folder: Path) -> list[Mapping[str, Any]]:
    """The error files of failing ranks, earliest first."""
    errors = [json.loads(file.read_text()) for file in folder.glob("rank-*.json")]
    return sorted(errors, key=lambda error: int(error["at_ns"]))


def _copy_lines(stream: IO[str], tail: deque[str]) -> None:
    """Forward the ranks' stderr until an interrupt; tracebacks after that are noise.

    Drain it to the end even if our own stderr is closed, or ranks would block on a full pipe.
    """
    for line in stream:
        tail.append(line)
        if not processes.relayed:
            with contextlib.suppress(OSError):
                print(line, end="", file=sys.stderr, flush=True)
