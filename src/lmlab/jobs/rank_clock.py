"""Time on several ranks: an operation is over when the slowest rank is done.

A barrier releases the ranks together before every repetition; each reads its own clock (clocks of
two processes are never compared), and a repetition took as long as on its slowest rank. Repetitions
go on until that time has settled. All ranks must stop at the same repetition, or the next message
finds no partner, so whatever decides is exchanged first: the times of all ranks, and the longest
time that one has been measuring.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

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
    """Each rank's own median, in the order of ranks."""


def gather_floats(values: list[float], device: torch.device) -> list[list[float]]:
    """The values of each rank, on every rank, in order of ranks."""
    # Gloo exchanges host memory, NCCL only GPU memory.
    home = device if dist.get_backend() == "nccl" else torch.device("cpu")
    mine = torch.tensor(values, dtype=torch.float64, device=home)
    parts = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, mine)
    return [part.tolist() for part in parts]


def largest(value: float, device: torch.device) -> float:
    """The largest of the ranks' values, the same on every rank."""
    return max(part[0] for part in gather_floats([value], device))


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
    """Repeat `run`, which every rank calls alike, until the slowest rank's time has settled.

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
        # Exchanging after every repetition would cost as much as a quick one takes.
        quick = by_repetition and max(by_repetition[-1]) < QUICK_S * 1e3
        batch = min(QUICK_BATCH if quick else 1, max_samples - rule.n)
        mine = [_sample_ms(run, device) for _ in range(batch)]
        *samples, elapsed = zip(
            *gather_floats([*mine, time.perf_counter() - began_s], device), strict=True
        )
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
