"""Several arms of one comparison, timed in turns on the same ranks.

A machine drifts: clocks change, a neighbour comes and goes. Arms measured one after the other carry
that drift in their ratio; arms that take turns share it. So every round times each arm once, and
what is compared is the ratio within a round. The order turns from round to round, because what ran
before leaves its mark on a cache and on an allocator: rounds start one arm later each time, and
every second one runs backwards, so that no arm always follows the same other.

All ranks start a step together, behind a barrier. A rank's time ends when its own device is done;
the step is as slow as its slowest rank, and the difference between ranks is kept as well. Warm-up
rounds run in the same loop and are thrown away. Whether the time is up is asked after each round,
of all ranks together.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from lmlab.measure import together
from lmlab.measure.clock import PhaseClock, collector_paused
from lmlab.measure.statistics import Measurement
from lmlab.measure.stop_rule import count_samples

Arm = Callable[[PhaseClock], None]
"""One step, its phases timed with the clock it is handed."""

FEWEST_ROUNDS = 3
"""Measured whatever the time cap says: with fewer there is no interval to speak of."""


@dataclass(frozen=True, kw_only=True)
class Rounds:
    """Milliseconds by arm and phase (`total` among them), a list a rank, round by round."""

    samples_ms: Mapping[str, Mapping[str, list[list[float]]]]
    stopped: str

    def slowest(self, arm: str, phase: str = "total") -> Measurement:
        """A step is over when its last rank is."""
        by_rank = self.samples_ms[arm][phase]
        slowest = tuple(max(times) for times in zip(*by_rank, strict=True))
        return Measurement(samples_ms=slowest, clock="wall", cache="warm", stopped=self.stopped)


def order_of(names: Sequence[str], number: int) -> list[str]:
    """The arms as round `number` runs them."""
    start = number % len(names)
    turned = [*names[start:], *names[:start]]
    return turned[::-1] if number % 2 else turned


def interleave(
    arms: Mapping[str, Arm],
    *,
    device: torch.device,
    warmup: int,
    rounds: int,
    time_cap_s: float,
) -> Rounds:
    """Time every arm once a round on every rank; all ranks call this together."""
    clock = PhaseClock(device)
    own: dict[str, list[dict[str, float]]] = {name: [] for name in arms}
    began = time.perf_counter()
    measured = 0
    with collector_paused():
        for number in range(warmup + rounds):
            for name in order_of(list(arms), number):
                dist.barrier()
                arms[name](clock)
                own[name].append(clock.take_step_ms())
            measured = max(number + 1 - warmup, 0)
            if measured >= FEWEST_ROUNDS and _time_is_up(began, time_cap_s):
                break
    kept = {name: _by_phase(steps[warmup:]) for name, steps in own.items()}
    return Rounds(samples_ms=_of_all_ranks(kept), stopped=_why(measured, rounds, time_cap_s))


def _time_is_up(began: float, time_cap_s: float) -> bool:
    return together.largest(time.perf_counter() - began) >= time_cap_s


def _why(measured: int, rounds: int, time_cap_s: float) -> str:
    if measured == rounds:
        return count_samples(measured)
    return f"time cap of {time_cap_s:g} s after {count_samples(measured)}"


def _by_phase(steps: Sequence[Mapping[str, float]]) -> dict[str, list[float]]:
    return {phase: [step[phase] for step in steps] for phase in steps[0]}


def _of_all_ranks(
    own: dict[str, dict[str, list[float]]],
) -> dict[str, dict[str, list[list[float]]]]:
    """What each rank measured, put side by side."""
    everyone = together.from_all_ranks(own)
    return {
        name: {phase: [theirs[name][phase] for theirs in everyone] for phase in phases}
        for name, phases in own.items()
    }
