"""Timing on several ranks: an operation takes as long as its slowest rank.

A barrier before every repetition starts the ranks together. Each rank reads its own clock; clocks
of different processes are never compared. All ranks must stop at the same repetition, or the next
message would have no receiver, so everything that decides is exchanged first: the times of all
ranks, and the longest elapsed time.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from lmlab.measure.across_ranks import gather
from lmlab.measure.clock import synchronize
from lmlab.measure.statistics import Measurement
from lmlab.measure.stop_rule import SamplingBudget, StopRule
from lmlab.measure.time_spent import measuring

QUICK_S = 0.02
QUICK_BATCH = 5


@dataclass(frozen=True, kw_only=True)
class RankTimes:
    """Repetitions of one operation on all ranks."""

    slowest: Measurement  # the slowest rank of each repetition
    rank_median_ms: tuple[float, ...]  # the median of each rank


@measuring()
def time_on_all_ranks(
    run: Callable[[], object],
    *,
    device: torch.device,
    warmup: int,
    min_samples: int,
    max_samples: int,
    target_relative_deviation: float,
    time_cap_s: float,
) -> RankTimes:
    """Repeat `run` on all ranks until the slowest rank's time has settled; the caller pauses the
    garbage collector, since a collection takes longer than many operations."""
    budget = SamplingBudget(
        min_samples=min_samples,
        min_time_s=0.0,
        target_relative_deviation=target_relative_deviation,
        time_cap_s=time_cap_s,
        max_samples=max_samples,
    )
    rule = StopRule(budget)
    by_repetition: list[tuple[float, ...]] = []
    stopped = None
    began_s = time.perf_counter()
    for _ in range(warmup):
        sample_ms(run, device)
    while stopped is None:
        # Exchanging times after every repetition would cost as much as a quick one takes.
        quick = by_repetition and max(by_repetition[-1]) < QUICK_S * 1e3
        batch = min(QUICK_BATCH if quick else 1, max_samples - rule.n)
        mine = [sample_ms(run, device) for _ in range(batch)]
        by_rank = gather([*mine, time.perf_counter() - began_s])
        *samples, elapsed = zip(*by_rank, strict=True)
        by_repetition += samples
        for ranks in samples:
            rule.add(max(ranks))
        stopped = rule.reason(max(elapsed)) if rule.n >= min_samples else None
    return RankTimes(
        slowest=Measurement(
            samples_ms=tuple(round(max(ranks), 6) for ranks in by_repetition),
            clock="wall",
            cache="warm",
            stopped=stopped,
        ),
        rank_median_ms=tuple(statistics.median(r) for r in zip(*by_repetition, strict=True)),
    )


def sample_ms(run: Callable[[], object], device: torch.device) -> float:
    """Milliseconds of one run on this rank, begun together with the others."""
    dist.barrier()
    synchronize(device)
    start = time.perf_counter_ns()
    run()
    synchronize(device)
    return (time.perf_counter_ns() - start) / 1e6
