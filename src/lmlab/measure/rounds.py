"""Timing on several ranks: one operation repeated, or several variants in interleaved rounds.

A barrier starts all ranks together. Each rank times itself with its own clock until its device is
done; clocks of different processes are never compared. A repetition takes as long as its slowest
rank, and the times of all ranks are recorded. All ranks must stop at the same repetition, or the
next collective would hang, so they first exchange everything the decision depends on.

A machine drifts: clocks change, other load comes and goes. Variants measured one after the other
carry that drift in their ratio; interleaved variants share it. Every round times each variant once,
and comparisons use the ratio within a round. The order changes from round to round, because each
variant affects caches and allocator for the next: every round starts one variant later, and every
second round runs backwards. With an even number of variants only every second one ever comes first,
and with two variants the order never changes. Warm-up rounds run in this loop and are discarded.
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from lmlab.measure.across_ranks import gather, max_over_ranks
from lmlab.measure.clock import PhaseClock, collector_paused, synchronize
from lmlab.measure.statistics import Measurement
from lmlab.measure.stop_rule import SamplingBudget, StopRule, count_samples
from lmlab.measure.time_spent import measuring

TimedStep = Callable[[PhaseClock], None]
"""One step of a variant; times its phases with the given clock."""

MIN_ROUNDS = 3  # measured regardless of the time cap: fewer give no confidence interval
QUICK_S, QUICK_BATCH = 0.02, 5  # quick repetitions exchange their times in batches


@dataclass(frozen=True, kw_only=True)
class Rounds:
    """Milliseconds by variant and phase (including `total`), indexed by rank and then round."""

    samples_ms: Mapping[str, Mapping[str, list[list[float]]]]
    stopped: str

    def slowest(self, variant: str, phase: str = "total") -> Measurement:
        """The time of the slowest rank in each round."""
        by_rank = self.samples_ms[variant][phase]
        slowest = tuple(max(times) for times in zip(*by_rank, strict=True))
        return Measurement(samples_ms=slowest, clock="wall", stopped=self.stopped)


def round_order(names: Sequence[str], number: int) -> list[str]:
    """The order in which round `number` runs the variants."""
    start = number % len(names)
    rotated = [*names[start:], *names[:start]]
    return rotated[::-1] if number % 2 else rotated


@measuring()
def interleave(
    variants: Mapping[str, TimedStep],
    *,
    device: torch.device,
    warmup: int,
    rounds: int,
    time_cap_s: float,
) -> Rounds:
    """Time every variant once per round on every rank; all ranks must call this together."""
    clock = PhaseClock(device)
    steps: dict[str, list[dict[str, float]]] = {name: [] for name in variants}
    started = time.perf_counter()
    measured = 0
    with collector_paused():
        for number in range(warmup + rounds):
            for name in round_order(list(variants), number):
                dist.barrier()
                variants[name](clock)
                steps[name].append(clock.take_step_ms())
            measured = max(number + 1 - warmup, 0)
            elapsed_s = time.perf_counter() - started
            if measured >= MIN_ROUNDS and max_over_ranks(elapsed_s) >= time_cap_s:
                break
    stopped = count_samples(measured)
    if measured < rounds:
        stopped = f"time cap of {time_cap_s:g} s after {stopped}"
    by_rank = gather({name: own[warmup:] for name, own in steps.items()})
    samples = {
        name: {
            phase: [[step[phase] for step in rank[name]] for rank in by_rank] for phase in own[0]
        }
        for name, own in steps.items()
    }
    return Rounds(samples_ms=samples, stopped=stopped)


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
    budget: SamplingBudget,
) -> RankTimes:
    """Repeat `run` on all ranks until the slowest rank's time has settled; the caller must pause
    the garbage collector, since a collection takes longer than many operations."""
    rule = StopRule(budget)
    by_repetition: list[tuple[float, ...]] = []
    stopped = None
    began_s = time.perf_counter()
    for _ in range(warmup):
        sample_ms(run, device)
    while stopped is None:
        # Exchanging times after every quick repetition would cost as much as the repetition.
        quick = by_repetition and max(by_repetition[-1]) < QUICK_S * 1e3
        batch = min(QUICK_BATCH if quick else 1, budget.max_samples - rule.n)
        mine = [sample_ms(run, device) for _ in range(batch)]
        by_rank = gather([*mine, time.perf_counter() - began_s])
        *samples, elapsed = zip(*by_rank, strict=True)
        by_repetition += samples
        for ranks in samples:
            rule.add(max(ranks))
        stopped = rule.reason(max(elapsed)) if rule.n >= budget.min_samples else None
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
    """Milliseconds of one run on this rank, started together with all other ranks."""
    dist.barrier()
    synchronize(device)
    start = time.perf_counter_ns()
    run()
    synchronize(device)
    return (time.perf_counter_ns() - start) / 1e6
