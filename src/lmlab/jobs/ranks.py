"""One rank of a measurement: the program that torchrun starts as often as a point has ranks.

    torchrun ... -m lmlab.jobs.ranks --point JSON --out PATH --notes FOLDER --timeout-s N

Every rank joins the process group, calls the chapter's `measure(point, device)` with its own
device, and rank 0 writes what it returned; what a chapter wants from the other ranks it gathers
itself. Where the ranks run is the point's `placement`:

    own_gpu      each rank has a GPU of its own; NCCL
    shared_gpu   all ranks on one GPU; gloo, since NCCL refuses two ranks on a device
    cpu          each rank has its share of the cores; gloo

`data.ranks` is what the process group itself says: `backend`, `world_size`, `device`, and the
`threads` of a rank, `nnodes` and `gpus` (how many the ranks use together).

A rank that fails leaves a note for the launcher and goes at once, without a word to the group:
taking leave properly would wait for ranks that wait for this one. A barrier after joining and one
before leaving keep a quick rank from closing connections that a slow one still needs.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from lmlab.jobs.outcome import Outcome, without_numbers
from lmlab.jobs.record import open_record
from lmlab.jobs.registry import load
from lmlab.jobs.run import attempt
from lmlab.measure.device import torch_device, usable_cores
from lmlab.measure.gpu_state import GpuWatch
from lmlab.measure.identity import find_machine
from lmlab.measure.warm_start.processes import die_with_parent
from lmlab.study.files import write_atomically
from lmlab.study.points import Point, point_from_json
from lmlab.study.results import Result

BACKENDS = {"own_gpu": "nccl", "shared_gpu": "gloo", "cpu": "gloo"}


@dataclass(frozen=True)
class Rank:
    """Which of the ranks this process is, as torchrun says it."""

    rank: int
    local_rank: int
    local_world_size: int

    @classmethod
    def of_this_process(cls) -> Rank:
        """Read torchrun's environment."""
        names = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        return cls(*(int(os.environ[name]) for name in names))


def main(argv: Sequence[str] | None = None) -> int:
    """Take part in a measurement; rank 0 writes its result."""
    arguments = _parser().parse_args(argv)
    me = Rank.of_this_process()
    if sys.platform == "linux":
        die_with_parent(os.getppid())  # a rank whose torchrun was killed would wait for nothing
    try:
        timeout = timedelta(seconds=arguments.timeout_s)
        result = take_part(point_from_json(arguments.point), me, timeout, arguments.notes)
        if result is not None:
            result.write(arguments.out)
    except Exception as error:
        traceback.print_exc()
        leave(arguments.notes, me, without_numbers("failed", f"{type(error).__name__}: {error}"))
    return 0


def take_part(point: Point, me: Rank, timeout: timedelta, notes: Path) -> Result | None:
    """Join the group, measure, and leave it together; what rank 0 writes."""
    if os.getcwd() not in sys.path:  # where a user's own model is looked for
        sys.path.insert(0, os.getcwd())
    placement = str(point.parameters["placement"])
    device = device_of(placement, me)
    record = open_record(point, find_machine()) if me.rank == 0 else None
    torch.set_num_threads(max(1, usable_cores() // me.local_world_size))
    with GpuWatch(device) as watch:
        join(BACKENDS[placement], device, timeout)
        outcome = attempt(load(point.chapter), point, device)
        # No numbers: it raised, and other ranks may be waiting for this one.
        if outcome.status != "ok" and not outcome.data:
            leave(notes, me, outcome)
        outcome = with_the_group(outcome, point, device)
        dist.barrier()
    dist.destroy_process_group()
    flags = [*watch_flags(watch, placement), *(["noisy"] if outcome.noisy else [])]
    return None if record is None else record.close(outcome.flagged(*flags))


def device_of(placement: str, me: Rank) -> torch.device:
    """The device that this rank computes on."""
    device = torch_device("cpu" if placement == "cpu" else "cuda")
    if placement == "own_gpu":
        return torch.device("cuda", me.local_rank)
    return device


def join(backend: str, device: torch.device, timeout: timedelta) -> None:
    """Initialise the default process group, and wait until all have."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    bound = device if backend == "nccl" else None
    dist.init_process_group(backend, timeout=timeout, device_id=bound)
    dist.barrier()


def with_the_group(outcome: Outcome, point: Point, device: torch.device) -> Outcome:
    """The outcome with what the process group says of itself."""
    world_size = dist.get_world_size()
    gpus = {"own_gpu": world_size, "shared_gpu": 1, "cpu": 0}
    group: dict[str, Any] = {
        "backend": dist.get_backend(),
        "world_size": world_size,
        "device": device.type,
        "gpus": gpus[str(point.parameters["placement"])],
        "nnodes": point.settings["nnodes"],
        "threads": torch.get_num_threads(),
    }
    return replace(outcome, data={**outcome.data, "ranks": group})


def watch_flags(watch: GpuWatch, placement: str) -> list[str]:
    """What the GPU's state says; where ranks share it, each finds the others on it."""
    return [flag for flag in watch.flags if (placement, flag) != ("shared_gpu", "gpu_shared")]


def leave(notes: Path, me: Rank, outcome: Outcome) -> NoReturn:
    """Say why, and end this process now; torchrun then ends the others."""
    note = {"rank": me.rank, "at_ns": time.time_ns()}
    words = {"status": outcome.status, "reason": outcome.reason}
    write_atomically(notes / f"rank-{me.rank}.json", json.dumps({**note, **words}))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="lmlab.jobs.ranks", description="One rank.")
    parser.add_argument("--point", required=True, help="the point as JSON")
    parser.add_argument("--out", required=True, type=Path, help="file that rank 0 writes")
    parser.add_argument("--notes", required=True, type=Path, help="folder for a rank that fails")
    parser.add_argument("--timeout-s", required=True, type=float, help="patience with other ranks")
    return parser


if __name__ == "__main__":
    sys.exit(main())
