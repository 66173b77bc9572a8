"""Several variants timed in alternating rounds on the same ranks.

A machine drifts: clocks change, other load comes and goes. Variants measured one after the other
carry that drift in their ratio; interleaved variants share it. Every round times each variant once,
and comparisons use the ratio within a round. The order changes from round to round, because each
variant leaves its mark on caches and allocator: every round starts one variant later, and every
second round runs backwards, so that no variant always follows the same one.

All ranks start a step together, after a barrier. A rank's time ends when its own device is done;
the step takes as long as its slowest rank, and the times of all ranks are recorded. Warm-up rounds
run in the same loop and are discarded. After each round all ranks decide together whether time is
up.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from lmlab.measure.across_ranks import gather, max_over_ranks
from lmlab.measure.clock import PhaseClock, collector_paused
from lmlab.measure.statistics import Measurement
from lmlab.measure.stop_rule import count_samples
from lmlab.measure.time_spent import measuring

TimedStep = Callable[[PhaseClock], None]
"""One step of a variant; times its phases with the given clock."""

MIN_ROUNDS = 3  # measured regardless of the time cap: fewer give no confidence interval


@dataclass(frozen=True, kw_only=True)
class Rounds:
    """Milliseconds by variant and phase (`total` among them): one list per rank, one per round."""

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
