"""Measure one point in this process; the program that a measurement job runs.

    python -m lmlab.jobs.run --point JSON --machine ID --out PATH

The machine must be the one that the result is stored under: a job scheduled elsewhere would store
one GPU's numbers under another's name. Measurements on one device never overlap, whoever started
them. Running out of memory, or any other error in the measured code, is recorded as a result. At
the time limit SIGALRM kills the process, even if it waits for a kernel that never returns. An
interrupt, or a machine that is not ready to measure at all, writes nothing.
"""

import argparse
import os
import re
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

import psutil
import torch

from lmlab.jobs import budget
from lmlab.jobs.outcome import NOTHING_WRITTEN, Outcome, Unsupported, without_numbers
from lmlab.jobs.preflight import refuse_unsupported
from lmlab.jobs.record import Record, write
from lmlab.jobs.registry import load
from lmlab.measure.device import is_out_of_memory, set_threads, torch_device
from lmlab.measure.exclusive import exclusive
from lmlab.measure.gpu_state import GpuWatch
from lmlab.measure.identity import Machine, find_machine
from lmlab.measure.time_spent import watch_triton
from lmlab.study.points import Point, point_from_json
from lmlab.study.results import Result
from lmlab.study.selection import machine_of

GIB = 2**30
CUDA_OOM = re.compile(
    r"(?s)Tried to allocate ([\d.]+ \w+).*?total capacity of ([\d.]+ \w+) of which ([\d.]+ \w+)"
)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure one point and write its result; exit status 2 if nothing is written."""
    parser = argparse.ArgumentParser(prog="lmlab.jobs.run", description="Measure one point.")
    parser.add_argument("--point", required=True, help="the point as JSON")
    parser.add_argument("--machine", required=True, help="this machine: ID, or ID@LABEL")
    parser.add_argument("--out", required=True, type=Path, help="file to write the result to")
    arguments = parser.parse_args(argv)
    try:
        machine = find_machine()
        if machine.id != machine_of(arguments.machine):
            raise ValueError(
                f"machine = {arguments.machine!r}, but this is {machine.id!r}; nothing is measured"
            )
        result = measure_point(point_from_json(arguments.point), machine, arguments.out)
        return write(result, arguments.out)
    except ValueError as error:
        print(error, file=sys.stderr)
    except OSError as error:
        print(f"{error.filename or arguments.out}: {error.strerror}", file=sys.stderr)
    return NOTHING_WRITTEN


def measure_point(point: Point, machine: Machine, out: Path) -> Result:
    """Measure a point in this process with exclusive use of its device; the results next to `out`
    show how much of the chapter's time budget is left."""
    import_from_working_folder()
    device = torch_device(machine.device)
    with exclusive(machine.device), budget.enforced(budget.limit_s()):
        record = Record(point, machine)
        if reason := budget.why_skipped(point.chapter, out):
            return record.close(without_numbers("unsupported", reason))
        set_threads()
        if device.type == "cuda":
            watch_triton()
        with GpuWatch(device) as watch:
            outcome = attempt(point, device)
    return record.close(outcome, watch.flags)


def import_from_working_folder() -> None:
    """Make a user's own model or attention importable from the working folder."""
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())


def attempt(point: Point, device: torch.device) -> Outcome:
    """Run a chapter's code; whatever it raises becomes an outcome with a reason."""
    try:
        refuse_unsupported(point, device)
        return load(point.chapter)(point, device)
    except Unsupported as error:
        return without_numbers("unsupported", str(error))
    except Exception as error:
        traceback.print_exc()
        if is_out_of_memory(error):
            return without_numbers("oom", memory_reason(error, device))
        return without_numbers("failed", f"{type(error).__name__}: {error}")


def memory_reason(error: BaseException, device: torch.device) -> str:
    """How much was requested and how much was free, from the allocator's message."""
    message = str(error)
    if gpu := CUDA_OOM.search(message):
        asked, capacity, free = gpu.groups()
        return f"needs {asked} more, {free} of the GPU's {capacity} free"
    if cpu := re.search(r"tried to allocate (\d+) bytes", message):
        memory = psutil.virtual_memory()
        return (
            f"needs {int(cpu[1]) / GIB:.2f} GiB more, {memory.available / GIB:.2f} GiB of the "
            f"machine's {memory.total / GIB:.2f} GiB free"
        )
    return f"{message or type(error).__name__} ({device.type})"


if __name__ == "__main__":
    sys.exit(main())
