"""One rank of a measurement; torchrun starts this program once per rank.

    torchrun ... -m lmlab.jobs.ranks --point JSON --out PATH

Every rank joins the process group and calls the chapter's `measure(point, device)`. Rank 0 writes
the outcome, with a description of the process group in `data.ranks`; chapters gather values from
other ranks themselves. The point's `placement` says where ranks run: `own_gpu` (one each, NCCL),
`shared_gpu` (all on one; gloo, since NCCL refuses two ranks on a device) or `cpu` (each with its
share of the cores; gloo).

A failing rank writes an error file and exits without destroying the process group; a clean shutdown
would deadlock. A barrier after joining and one before leaving keep a fast rank from closing
connections that a slow one still needs.
"""

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
from typing import Any, NoReturn

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


def main(argv: Sequence[str] | None = None) -> int:
    """Take part in a measurement; rank 0 writes its result."""
    parser = argparse.ArgumentParser(prog="lmlab.jobs.ranks", description="One rank.")
    parser.add_argument("--point", required=True, help="the point as JSON")
    parser.add_argument("--out", required=True, type=Path, help="file that rank 0 writes")
    arguments = parser.parse_args(argv)
    die_with_parent(os.getppid())  # or it would outlive a torchrun that was killed
    try:
        result = take_part(point_from_json(arguments.point))
        if result is not None:
            write(result, arguments.out)
    except Exception as error:
        traceback.print_exc()
        leave(without_numbers("failed", f"{type(error).__name__}: {error}"))
    return 0


def take_part(point: Point) -> Result | None:
    """Join the process group, measure, leave it together; returns the result on rank 0."""
    import_from_working_folder()
    placement = str(point.parameters["placement"])
    device = torch_device("cpu" if placement == "cpu" else "cuda")
    if placement == "own_gpu":
        device = torch.device("cuda", from_torchrun("LOCAL_RANK"))
    record = Record(point, find_machine()) if from_torchrun("RANK") == 0 else None
    torch.set_num_threads(max(1, usable_cores() // from_torchrun("LOCAL_WORLD_SIZE")))
    with GpuWatch(device) as watch:
        join(BACKENDS[placement], device)
        outcome = attempt(point, device)
        # No numbers: it raised, and other ranks may be waiting for this one.
        if outcome.status != "ok" and not outcome.data:
            leave(outcome)
        group = describe_group(point, device)
        dist.barrier()
    dist.destroy_process_group()
    # Ranks that share a GPU see each other on it; that is not outside interference.
    flags = [flag for flag in watch.flags if (placement, flag) != ("shared_gpu", "gpu_shared")]
    outcome = replace(outcome, data={**outcome.data, "ranks": group})
    return None if record is None else record.close(outcome, flags)


def from_torchrun(variable: str) -> int:
    """An integer that torchrun sets in each rank's environment."""
    return int(os.environ[variable])


def join(backend: str, device: torch.device) -> None:
    """Initialize the default process group and wait for all ranks."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    timeout = timedelta(seconds=float(os.environ.get(TIMEOUT, DEFAULT_TIMEOUT_S)))
    bound = device if backend == "nccl" else None
    dist.init_process_group(backend, timeout=timeout, device_id=bound)
    dist.barrier()


def describe_group(point: Point, device: torch.device) -> dict[str, Any]:
    """Describe the process group; `gpus` is how many GPUs all ranks use together."""
    world_size = dist.get_world_size()
    gpus = {"own_gpu": world_size, "shared_gpu": 1, "cpu": 0}
    return {
        "backend": dist.get_backend(),
        "world_size": world_size,
        "device": device.type,
        "gpus": gpus[str(point.parameters["placement"])],
        "nnodes": point.settings["nnodes"],
        "threads": torch.get_num_threads(),
    }


def leave(outcome: Outcome) -> NoReturn:
    """Write the error file, if a folder is set, and exit at once; torchrun ends the other ranks."""
    if folder := os.environ.get(RANK_ERRORS):
        failure = {"status": outcome.status, "reason": outcome.reason}
        error = {"rank": from_torchrun("RANK"), "at_ns": time.time_ns(), **failure}
        write_atomically(Path(folder, f"rank-{error['rank']}.json"), json.dumps(error))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
