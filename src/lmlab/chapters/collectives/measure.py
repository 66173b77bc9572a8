"""Collectives: how long ranks take to exchange tensors, by operation, dtype and size.

One job measures all operations, dtypes and sizes for a placement and world size, because launching
the ranks takes longer than most collectives. Sizes follow nccl-tests: the bytes a rank has after an
all-gather or before a reduce-scatter, rounded down to a multiple of the world size. Reductions
average, as in training. On gloo a reduce-scatter is an all-reduce (see lmlab.parallel.collectives).

Every operation is first checked for correct results. Cases then run from small to large, the first
operation in the first dtype ahead of the others. A case whose minimum number of repetitions does
not fit into the job's remaining time is skipped, with a reason.

Records: `time` of the slowest rank per `operation`, `dtype` and `bytes`, or the reason why there is
none. `data.rank_median_ms`: the median of every rank per case.
"""

import time
from collections.abc import Callable
from itertools import product
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lmlab.jobs.outcome import Outcome
from lmlab.measure.across_ranks import max_over_ranks
from lmlab.measure.clock import collector_paused
from lmlab.measure.precision import precision_named
from lmlab.measure.records import timed, without_value
from lmlab.measure.rounds import RankTimes, time_on_all_ranks
from lmlab.measure.stop_rule import SamplingBudget
from lmlab.parallel import collectives
from lmlab.parallel.collectives import Pending
from lmlab.study.points import Point

MIB = 2**20
AHEAD = 32
"""The first operation may run sizes this many times larger before the others' turn."""
MIN_SAMPLES, MAX_SAMPLES = 5, 50
MIN_SLOW_SAMPLES = 3
SLOW_S = 1.0
"""A repetition this long is expensive and varies little: fewer samples, no warm-up."""
CASE_CAP_S = 0.3
"""A case that takes longer gets the minimum number of repetitions."""
TARGET_RELATIVE_DEVIATION = 0.02
PATTERN_ELEMENTS = 2**20
"""Random numbers, repeated to fill a tensor: drawing a GiB takes longer than sending it."""
_CHECKED_ELEMENTS = 24  # per rank


class Case(NamedTuple):
    """One operation on one tensor."""

    operation: str
    dtype: str
    bytes: int


def measure(point: Point, device: torch.device) -> Outcome:
    """Check every operation, then time the cases in order until the time is up."""
    torch.manual_seed(point.settings["seed"] + dist.get_rank())
    job = Job(device, time_cap_s=point.settings["time_cap_s"])
    refusals = {kind: why_refused(*kind, device) for kind in kinds(point)}
    cases = ordered_cases(point, dist.get_world_size())
    records, ranks = [], []
    with collector_paused():
        for index, case in enumerate(cases):
            refusal = refusals[case.operation, case.dtype]
            times = refusal or job.time(case, cases_left=len(cases) - index)
            if isinstance(times, str):
                records.append(without_value("time", "unsupported", times, **case._asdict()))
                continue
            records.append(timed(times.slowest, "time", **case._asdict()))
            medians = [round(median, 6) for median in times.rank_median_ms]
            ranks.append({**case._asdict(), "ms": medians})
    return Outcome(measurements=records, data={"rank_median_ms": ranks})


def kinds(point: Point) -> list[tuple[str, str]]:
    """Pairs of operation and dtype, the most important first."""
    return list(product(point.settings["operations"], point.settings["dtypes"]))


def ordered_cases(point: Point, world_size: int) -> list[Case]:
    """All cases from small to large, the first operation and dtype ahead of the others."""
    first, *_ = kinds(point)
    pairs = list(product(kinds(point), point.settings["sizes_mib"]))
    pairs.sort(key=lambda pair: pair[1] / AHEAD if pair[0] == first else pair[1])
    return [
        Case(*kind, divisible(size * MIB, world_size, precision_named(kind[1]).dtype.itemsize))
        for kind, size in pairs
    ]


def divisible(size: int, world_size: int, item_bytes: int) -> int:
    """The size rounded down so that all ranks get the same number of elements."""
    return size - size % (world_size * item_bytes)


def why_refused(operation: str, dtype: str, device: torch.device) -> str | None:
    """Why the backend refuses an operation, or None; raises if its result is wrong."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    kind = precision_named(dtype).dtype
    whole = torch.full((_CHECKED_ELEMENTS * world_size,), rank + 1.0, dtype=kind, device=device)
    part = torch.full((_CHECKED_ELEMENTS,), rank + 1.0, dtype=kind, device=device)
    try:
        found = OPERATIONS[operation](whole, part).wait().float().cpu()
    except (RuntimeError, NotImplementedError) as error:
        # Refused before anything is sent, so on every rank; a broken link fails in the barrier.
        dist.barrier()
        return " ".join(str(error).split())[:200] or type(error).__name__
    if not torch.equal(found, expected_result(operation, world_size)):
        raise RuntimeError(f"{operation} of {dtype} on {world_size} ranks gives {found.tolist()}")
    return None


class Job:
    """Times cases within a time cap, given how long each operation has taken so far."""

    def __init__(self, device: torch.device, *, time_cap_s: float) -> None:
        self._device = device
        self._cap_s = time_cap_s
        self._began_s = time.perf_counter()
        self._pattern = torch.randn(PATTERN_ELEMENTS, device=device)
        self._s_per_byte: dict[tuple[str, str], float] = {}

    def time(self, case: Case, *, cases_left: int) -> RankTimes | str:
        """Times of one case, or the reason why there are none."""
        kind = case.operation, case.dtype
        left_s = self._cap_s - max_over_ranks(time.perf_counter() - self._began_s)
        each_s = self._s_per_byte.get(kind, 0.0) * case.bytes
        if reason := why_skipped(left_s, each_s):
            return reason
        budget = SamplingBudget(
            min_samples=min_samples(each_s),
            min_time_s=0.0,
            max_samples=MAX_SAMPLES,
            target_relative_deviation=TARGET_RELATIVE_DEVIATION,
            time_cap_s=min(CASE_CAP_S, left_s / cases_left),
        )
        start, buffers = OPERATIONS[case.operation], self._buffers(case)
        times = time_on_all_ranks(
            lambda: start(*buffers).wait(),
            device=self._device,
            warmup=int(each_s < SLOW_S),
            budget=budget,
        )
        self._s_per_byte[kind] = times.slowest.median_ms / 1e3 / case.bytes
        return times

    def _buffers(self, case: Case) -> tuple[Tensor, Tensor]:
        """A tensor of the case's size and one rank's part of it, with random values."""
        dtype = precision_named(case.dtype).dtype
        elements = case.bytes // dtype.itemsize
        pattern = self._pattern.to(dtype)
        whole = pattern.repeat(-(-elements // pattern.numel()))[:elements]
        return whole, whole[: elements // dist.get_world_size()].clone()


def min_samples(each_s: float) -> int:
    """The fewest repetitions that a case is measured with."""
    return MIN_SAMPLES if each_s < SLOW_S else MIN_SLOW_SAMPLES


def why_skipped(left_s: float, each_s: float) -> str | None:
    """Why a case does not fit into the remaining time, or None."""
    if left_s <= 0:
        return "the job's time was up"
    count = min_samples(each_s)
    if left_s >= count * each_s:
        return None
    return f"{count} repetitions take about {count * each_s:.2g} s, {left_s:.2g} s were left"


# Each takes a whole tensor and one rank's part of it.
OPERATIONS: dict[str, Callable[[Tensor, Tensor], Pending]] = {
    "all_reduce": lambda whole, part: collectives.start_mean_all_reduce(whole),
    "all_gather": collectives.start_all_gather,
    "reduce_scatter": lambda whole, part: collectives.start_mean_reduce_scatter(part, whole),
    "broadcast": lambda whole, part: collectives.start_broadcast(whole, 0),
}


def expected_result(operation: str, world_size: int) -> Tensor:
    """The result if every element of rank r is r + 1."""
    mean = (world_size + 1) / 2
    whole = _CHECKED_ELEMENTS * world_size
    return {
        "all_reduce": torch.full((whole,), mean),
        "all_gather": torch.arange(1.0, world_size + 1).repeat_interleave(_CHECKED_ELEMENTS),
        "reduce_scatter": torch.full((_CHECKED_ELEMENTS,), mean),
        "broadcast": torch.full((whole,), 1.0),
    }[operation]
