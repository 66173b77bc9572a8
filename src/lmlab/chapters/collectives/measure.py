"""Collectives: how long ranks take to exchange tensors, by operation, size and number format.

One job goes through all operations, sizes and formats of a placement and world size, since starting
the ranks takes longer than most of it. Sizes are counted as nccl-tests counts them: what a rank
holds after an all-gather or before a reduce-scatter, all ranks' parts together; for 6 ranks it is
cut to the next multiple of them. Reductions average, as training does; torch makes gloo's
reduce-scatter of an all-reduce (see lmlab.parallel.collectives).

Every operation first has to give the right numbers. Then the sizes follow, from the small to the
large; a case whose fewest repetitions would not fit into what is left of the job's time is not
begun and says so. The first operation in the first format may go far ahead of the others, so that
what is cut is what the study needs least.

`data.cases`: a row each with `operation`, `dtype`, `size_bytes`, and either `reason` or the slowest
rank's times (`samples_ms`, their statistics, `stopped`) and `rank_median_ms`. `measurements` holds
the largest case of the first operation alone, as a headline.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lmlab.jobs.outcome import Outcome
from lmlab.jobs.rank_clock import RankTimes, largest, time_on_all_ranks
from lmlab.measure.clock import collector_paused
from lmlab.measure.precision import precision_named
from lmlab.measure.statistics import Measurement
from lmlab.parallel.collectives import (
    start_all_gather,
    start_broadcast,
    start_mean_all_reduce,
    start_mean_reduce_scatter,
)
from lmlab.study.points import Point

MIB = 2**20
AHEAD = 32
"""The first operation takes sizes up to so many times larger before the others' turn."""
MIN_SAMPLES, MAX_SAMPLES = 5, 50
FEWEST_OF_SLOW = 3
SLOW_S = 1.0
"""A repetition that takes so long is expensive, and scatters little: it gets fewer, no warm-up."""
CASE_CAP_S = 0.3
"""A case that takes longer gets its fewest repetitions and no more."""
TARGET_RELATIVE_DEVIATION = 0.02
PATTERN_ELEMENTS = 2**20
"""Random numbers that repeat: drawing a GiB of them takes longer than sending it."""
_CHECKED_ELEMENTS = 24  # divides among 1, 2, 3, 4, 6 and 8 ranks


@dataclass(frozen=True)
class Case:
    """One operation on one tensor."""

    operation: str
    dtype: str
    size_bytes: int

    def row(self, **more: Any) -> dict[str, Any]:
        """The case in a result."""
        return {
            "operation": self.operation,
            "dtype": self.dtype,
            "size_bytes": self.size_bytes,
            **more,
        }


def measure(point: Point, device: torch.device) -> Outcome:
    """Check every operation, then time the cases in order until the time is up."""
    torch.manual_seed(point.settings["seed"] + dist.get_rank())
    job = Job(device, time_cap_s=point.settings["time_cap_s"])
    for operation in point.settings["operations"]:
        for dtype in point.settings["dtypes"]:
            job.check(operation, dtype)
    cases = in_order(point, dist.get_world_size())
    with collector_paused():
        rows = [job.take(case, cases_left=len(cases) - index) for index, case in enumerate(cases)]
    return Outcome(measurements=headline(rows, point), data={"cases": rows})


def in_order(point: Point, world_size: int) -> list[Case]:
    """All cases, those that matter most first."""
    operations, dtypes = point.settings["operations"], point.settings["dtypes"]
    kinds = [(operation, dtype) for operation in operations for dtype in dtypes]
    pairs = [(kind, size) for kind in kinds for size in point.settings["sizes_mib"]]
    pairs.sort(key=lambda pair: pair[1] / AHEAD if pair[0] == kinds[0] else pair[1])
    return [
        Case(*kind, divisible(size * MIB, world_size, itemsize(kind[1]))) for kind, size in pairs
    ]


def divisible(size_bytes: int, world_size: int, item_bytes: int) -> int:
    """The size cut down to equal whole parts for all ranks."""
    unit = world_size * item_bytes
    return size_bytes // unit * unit


def itemsize(dtype: str) -> int:
    """Bytes of one number."""
    return precision_named(dtype).dtype.itemsize


class Job:
    """What is known so far: which operations work, how long they took, how much time is left."""

    def __init__(self, device: torch.device, *, time_cap_s: float) -> None:
        self._device = device
        self._cap_s = time_cap_s
        self._began_s = time.perf_counter()
        self._pattern = torch.randn(PATTERN_ELEMENTS, device=device)
        self._per_byte_s: dict[tuple[str, str], float] = {}
        self._refused: dict[tuple[str, str], str] = {}

    def check(self, operation: str, dtype: str) -> None:
        """Hold a small exchange against what it must give; note a backend that refuses it."""
        rank, world_size = dist.get_rank(), dist.get_world_size()
        whole = torch.full((_CHECKED_ELEMENTS * world_size,), rank + 1.0, device=self._device)
        part = torch.full((_CHECKED_ELEMENTS,), rank + 1.0, device=self._device)
        kind = precision_named(dtype).dtype
        try:
            got = OPERATIONS[operation](whole.to(kind), part.to(kind))().float().cpu()
        except (RuntimeError, NotImplementedError) as error:
            # Before a byte is sent, so on every rank alike; a broken connection shows again below.
            self._refused[operation, dtype] = " ".join(str(error).split())[:200]
            dist.barrier()
            return
        expected = expectation(operation, world_size)
        if not torch.equal(got, expected):
            raise RuntimeError(f"{operation} of {dtype} on {world_size} ranks gives {got.tolist()}")

    def take(self, case: Case, *, cases_left: int) -> dict[str, Any]:
        """Time one case, or say why not."""
        kind = (case.operation, case.dtype)
        if kind in self._refused:
            return case.row(reason=self._refused[kind])
        left_s = self._cap_s - largest(time.perf_counter() - self._began_s, self._device)
        each_s = self._per_byte_s.get(kind, 0.0) * case.size_bytes
        if left_s < fewest(each_s) * each_s or left_s <= 0:
            return case.row(reason=no_time(left_s, each_s))
        times = time_on_all_ranks(
            OPERATIONS[case.operation](*self.buffers(case)),
            device=self._device,
            warmup=1 if each_s < SLOW_S else 0,
            min_samples=fewest(each_s),
            max_samples=MAX_SAMPLES,
            target_relative_deviation=TARGET_RELATIVE_DEVIATION,
            time_cap_s=min(CASE_CAP_S, left_s / cases_left),
        )
        self._per_byte_s[kind] = times.slowest.median_ms / 1e3 / case.size_bytes
        return case.row(**numbers(times))

    def buffers(self, case: Case) -> tuple[Tensor, Tensor]:
        """A tensor of the case's size and one rank's part of it, filled with random numbers."""
        dtype = precision_named(case.dtype).dtype
        elements = case.size_bytes // dtype.itemsize
        pattern = self._pattern.to(dtype)
        whole = pattern.repeat(-(-elements // pattern.numel()))[:elements]
        return whole, whole[: elements // dist.get_world_size()].clone()


def fewest(each_s: float) -> int:
    """Repetitions that a case gets whatever they take."""
    return MIN_SAMPLES if each_s < SLOW_S else FEWEST_OF_SLOW


def no_time(left_s: float, each_s: float) -> str:
    """Why a case was not begun."""
    if left_s <= 0:
        return "the job's time was up"
    count = fewest(each_s)
    return f"{count} repetitions take about {count * each_s:.2g} s, {left_s:.2g} s were left"


def numbers(times: RankTimes) -> dict[str, Any]:
    """The times of a case as they stand in its row."""
    ranks = [round(each, 6) for each in times.rank_median_ms]
    return {**times.slowest.to_json(), "rank_median_ms": ranks}


Prepared = Callable[[], Tensor]


def _all_reduce(whole: Tensor, part: Tensor) -> Prepared:
    return lambda: start_mean_all_reduce(whole, None).wait()


def _all_gather(whole: Tensor, part: Tensor) -> Prepared:
    return lambda: start_all_gather(whole, part, None).wait()


def _reduce_scatter(whole: Tensor, part: Tensor) -> Prepared:
    return lambda: start_mean_reduce_scatter(part, whole, None).wait()


def _broadcast(whole: Tensor, part: Tensor) -> Prepared:
    return lambda: start_broadcast(whole, 0, None).wait()


OPERATIONS: dict[str, Callable[[Tensor, Tensor], Prepared]] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "broadcast": _broadcast,
}


def expectation(operation: str, world_size: int) -> Tensor:
    """What an operation must give where every rank has its number, counted from 1, everywhere."""
    mean = (world_size + 1) / 2
    whole = _CHECKED_ELEMENTS * world_size
    return {
        "all_reduce": torch.full((whole,), mean),
        "all_gather": torch.arange(1.0, world_size + 1).repeat_interleave(_CHECKED_ELEMENTS),
        "reduce_scatter": torch.full((_CHECKED_ELEMENTS,), mean),
        "broadcast": torch.full((whole,), 1.0),
    }[operation]


def headline(rows: list[dict[str, Any]], point: Point) -> dict[str, Measurement]:
    """The largest measured case of the first operation, for a progress line."""
    first = (point.settings["operations"][0], point.settings["dtypes"][0])
    timed = [r for r in rows if (r["operation"], r["dtype"]) == first and "samples_ms" in r]
    if not timed:
        return {}
    row = max(timed, key=lambda row: int(row["size_bytes"]))
    name = f"{row['operation']} {row['dtype']} {row['size_bytes'] / MIB:.4g} MiB"
    measurement = Measurement(
        samples_ms=tuple(row["samples_ms"]),
        clock=row["clock"],
        cache=row["cache"],
        stopped=row["stopped"],
    )
    return {name: measurement}
