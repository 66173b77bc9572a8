"""Timing on several ranks: an operation takes as long as its slowest rank.

A barrier before every repetition starts the ranks together. Each rank reads its own clock, from
call to return; clocks of different processes are never compared. Repetitions continue until the
time of the slowest rank has settled. All ranks must stop at the same repetition, or the next
message would have no receiver, so everything that decides is exchanged first: the times of all
ranks, and the longest elapsed time.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from lmlab.measure.across_ranks import gather
from lmlab.measure.clock import synchronize
from lmlab.measure.statistics import Measurement
from lmlab.measure.stop_rule import StopRule

QUICK_S = 0.02
QUICK_BATCH = 5


@dataclass(frozen=True, kw_only=True)
class RankTimes:
    """Repetitions of one operation on all ranks."""

    slowest: Measurement
    """The slowest rank of each repetition."""
    rank_median_ms: tuple[float, ...]
    """The median of each rank."""


def time_on_all_ranks(
    run: Callable[[], Tensor],
    *,
    device: torch.device,
    warmup: int,
    min_samples: int,
    max_samples: int,
    target_relative_deviation: float,
    time_cap_s: float,
) -> RankTimes:
    """Repeat `run` on all ranks until the slowest rank's time has settled.

    The caller pauses the garbage collector: a collection takes longer than many operations.
    """
    rule = StopRule(
        min_samples=min_samples,
        min_time_s=0.0,
        target_relative_deviation=target_relative_deviation,
        time_cap_s=time_cap_s,
        max_samples=max_samples,
    )
    by_repetition: list[list[float]] = []
    stopped: str | None = None
    began_s = time.perf_counter()
    for _ in range(warmup):
        _sample_ms(run, device)
    while stopped is None:
        # Exchanging times after every repetition would cost as much as a quick one takes.
        quick = by_repetition and max(by_repetition[-1]) < QUICK_S * 1e3
        batch = min(QUICK_BATCH if quick else 1, max_samples - rule.n)
        mine = [_sample_ms(run, device) for _ in range(batch)]
        ranks_samples = gather([*mine, time.perf_counter() - began_s])
        *samples, elapsed = zip(*ranks_samples, strict=True)
        for ranks in samples:
            by_repetition.append(list(ranks))
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


def _sample_ms(run: Callable[[], Tensor], device: torch.device) -> float:
    dist.barrier()
    synchronize(device)
    start = time.perf_counter_ns()
    run()
    synchronize(device)
    return (time.perf_counter_ns() - start) / 1e6
