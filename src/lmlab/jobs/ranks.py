"""One rank of a measurement: the program that torchrun starts once per rank.

    torchrun ... -m lmlab.jobs.ranks --point JSON --out PATH

Every rank joins the process group and calls the chapter's `measure(point, device)`; rank 0 writes
what it returned. What a chapter wants from other ranks it gathers itself. Where the ranks run is
the point's `placement`:

    own_gpu      each rank has its own GPU; NCCL
    shared_gpu   all ranks on one GPU; gloo, since NCCL refuses two ranks on a device
    cpu          each rank has its share of the cores; gloo

`data.ranks` holds what the process group reports: `backend`, `world_size`, `device`, `threads` per
rank, `nnodes` and `gpus` (how many the ranks use together).

A failing rank writes an error file and exits without destroying the process group; a clean shutdown
would deadlock. A barrier after joining and one before leaving keep a fast rank from closing
connections that a slow one still needs.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple, NoReturn

import torch
import torch.distributed as dist

from lmlab.jobs.outcome import Outcome, without_numbers
from lmlab.jobs.record import Record, write
from lmlab.jobs.registry import RANK_ERRORS
from lmlab.jobs.run import attempt, import_from_working_folder
from lmlab.measure.device import torch_device, usable_cores
from lmlab.measure.gpu_state import GpuWatch
from lmlab.measure.identity import find_machine
from lmlab.measure.warm_start.processes import die_with_parent
from lmlab.study.files import write_atomically
from lmlab.study.points import Point, point_from_json
from lmlab.study.results import Result

BACKENDS = {"own_gpu": "nccl", "shared_gpu": "gloo", "cpu": "gloo"}
TIMEOUT = "LMLAB_COLLECTIVE_TIMEOUT_S"
"""Environment variable: how long a rank waits for the others, so that a stuck job ends."""
DEFAULT_TIMEOUT_S = "45"


class Rank(NamedTuple):
    """Which of the ranks this process is, as torchrun says in its environment."""

    rank: int
    local_rank: int
    local_world_size: int


def main(argv: Sequence[str] | None = None) -> int:
    """Take part in a measurement; rank 0 writes its result."""
    parser = argparse.ArgumentParser(prog="lmlab.jobs.ranks", description="One rank.")
    parser.add_argument("--point", required=True, help="the point as JSON")
    parser.add_argument("--out", required=True, type=Path, help="file that rank 0 writes")
    arguments = parser.parse_args(argv)
    me = Rank(*(int(os.environ[field.upper()]) for field in Rank._fields))
    die_with_parent(os.getppid())  # or it would outlive a torchrun that was killed
    try:
        result = take_part(point_from_json(arguments.point), me)
        if result is not None:
            write(result, arguments.out)
    except Exception as error:
        traceback.print_exc()
        leave(me, without_numbers("failed", f"{type(error).__name__}: {error}"))
    return 0


def take_part(point: Point, me: Rank) -> Result | None:
    """Join the group, measure, and leave it together; what rank 0 writes."""
    import_from_working_folder()
    placement = str(point.parameters["placement"])
    device = device_of(placement, me)
    record = Record(point, find_machine()) if me.rank == 0 else None
    torch.set_num_threads(max(1, usable_cores() // me.local_world_size))
    with GpuWatch(device) as watch:
        join(BACKENDS[placement], device)
        outcome = attempt(point, device)
        # No numbers: it raised, and other ranks may be waiting for this one.
        if outcome.status != "ok" and not outcome.data:
            leave(me, outcome)
        outcome = with_group(outcome, point, device)
        dist.barrier()
    dist.destroy_process_group()
    # Ranks that share a GPU see each other on it; that is not outside interference.
    flags = [flag for flag in watch.flags if (placement, flag) != ("shared_gpu", "gpu_shared")]
    flags += ["noisy"] if outcome.noisy else []
    return None if record is None else record.close(outcome.flagged(*flags))


def device_of(placement: str, me: Rank) -> torch.device:
    """The device that this rank computes on."""
    device = torch_device("cpu" if placement == "cpu" else "cuda")
    return torch.device("cuda", me.local_rank) if placement == "own_gpu" else device


def join(backend: str, device: torch.device) -> None:
    """Initialise the default process group, and wait until all ranks have."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    timeout = timedelta(seconds=float(os.environ.get(TIMEOUT, DEFAULT_TIMEOUT_S)))
    bound = device if backend == "nccl" else None
    dist.init_process_group(backend, timeout=timeout, device_id=bound)
    dist.barrier()


def with_group(outcome: Outcome, point: Point, device: torch.device) -> Outcome:
    """The outcome with what the process group reports."""
    world_size = dist.get_world_size()
    gpus = {"own_gpu": world_size, "shared_gpu": 1, "cpu": 0}
    group = {
        "backend": dist.get_backend(),
        "world_size": world_size,
        "device": device.type,
        "gpus": gpus[str(point.parameters["placement"])],
        "nnodes": point.settings["nnodes"],
        "threads": torch.get_num_threads(),
    }
    return replace(outcome, data={**outcome.data, "ranks": group})


def leave(me: Rank, outcome: Outcome) -> NoReturn:
    """Write the error file, if anyone asked for it, and exit now; torchrun then ends the others."""
    if folder := os.environ.get(RANK_ERRORS):
        failure = {"status": outcome.status, "reason": outcome.reason}
        error = {"rank": me.rank, "at_ns": time.time_ns(), **failure}
        write_atomically(Path(folder, f"rank-{me.rank}.json"), json.dumps(error))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
