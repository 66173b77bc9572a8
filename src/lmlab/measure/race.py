"""Several calls timed against each other: in rounds, so that none has the quiet hour for itself.

A GPU's clock follows its temperature and power, and a neighbour on the host comes and goes. Ten
variants timed one after the other are therefore timed under ten different conditions. Here they
take turns: a few samples each, round after round, until the rule of every arm says that it has
enough (`stop_rule`); an arm that is done sits out. Samples are those of the kernel clock: CUDA
events around a call with a flushed cache, on a CPU the host's clock.

An arm is prepared anew for each turn and dropped after it, because what it holds (the graph of a
backward pass is gigabytes of scores) must not stand in the way of the others. The first call of a
turn is never a sample: it finds the allocator as the arm before has left it.

An arm that raises is out of the race and its error is returned; the others go on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from lmlab.measure.clock import collector_paused, synchronize
from lmlab.measure.cuda_events import EventSampler
from lmlab.measure.statistics import Measurement
from lmlab.measure.stop_rule import StopRule

Call = Callable[[], object]
Prepare = Callable[[], Call]

SAMPLES_A_TURN = 10


@dataclass(frozen=True, kw_only=True)
class Patience:
    """How long each arm is sampled."""

    min_samples: int = 10
    min_time_s: float = 0.01
    target_relative_deviation: float = 0.005
    max_samples: int = 40
    time_cap_s: float = 0.2
    """Of one arm, all its turns together; one sample is always taken."""

    def rule(self) -> StopRule:
        """A rule that has seen nothing yet."""
        return StopRule(
            min_samples=self.min_samples,
            min_time_s=self.min_time_s,
            target_relative_deviation=self.target_relative_deviation,
            time_cap_s=self.time_cap_s,
            max_samples=self.max_samples,
        )


@dataclass
class _Arm:
    prepare: Prepare
    rule: StopRule
    samples: list[float] = field(default_factory=list)
    elapsed_s: float = 0.0
    stopped: str | None = None
    error: Exception | None = None

    def take_turn(self, device: torch.device) -> None:
        """A few more samples, as many as the time that is left allows."""
        started = time.perf_counter()
        call = self.prepare()
        call_s = _seconds(call, device)
        left_s = self.rule.time_cap_s - self.elapsed_s - (time.perf_counter() - started)
        fitting = max(1, int(left_s / max(call_s, 1e-9)))
        count = min(SAMPLES_A_TURN, fitting, self.rule.max_samples - self.rule.n)
        for sample in _sampler(call, device)(count):
            self.samples.append(sample)
            self.rule.add(sample)
        self.elapsed_s += time.perf_counter() - started
        self.stopped = self.rule.reason(self.elapsed_s)


def measure_in_rounds(
    arms: Mapping[str, Prepare], *, device: torch.device, patience: Patience
) -> tuple[dict[str, Measurement], dict[str, Exception]]:
    """Time each arm's call against the others; measurements, and errors of arms that raised."""
    race = {name: _Arm(prepare, patience.rule()) for name, prepare in arms.items()}
    with collector_paused():
        while waiting := [arm for arm in race.values() if not arm.stopped and not arm.error]:
            for arm in waiting:
                try:
                    arm.take_turn(device)
                except Exception as error:
                    # Without its frames, which hold the tensors that filled the memory.
                    arm.error = error.with_traceback(None)
    return (
        {name: _measurement(arm, device) for name, arm in race.items() if not arm.error},
        {name: arm.error for name, arm in race.items() if arm.error},
    )


def _measurement(arm: _Arm, device: torch.device) -> Measurement:
    assert arm.stopped is not None, "the race ends when every arm has stopped"
    on_gpu = device.type == "cuda"
    return Measurement(
        samples_ms=tuple(arm.samples),
        clock="events" if on_gpu else "wall",
        cache="cold" if on_gpu else "warm",
        stopped=arm.stopped,
    )


def _seconds(call: Call, device: torch.device) -> float:
    before = time.perf_counter()
    call()
    synchronize(device)
    return time.perf_counter() - before


def _sampler(call: Call, device: torch.device) -> Callable[[int], list[float]]:
    if device.type == "cuda":
        return EventSampler(call, device, flush_cache=True)
    return lambda count: [1e3 * _seconds(call, device) for _ in range(count)]
