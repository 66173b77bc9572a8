"""Several kernels timed against each other in alternating rounds.

A GPU's clock follows its temperature and power, and other load on the host comes and goes, so
variants timed one after the other are timed under different conditions. Here they take turns: a few
samples each, round after round, until each variant's stopping rule is satisfied (`stop_rule`); a
variant that is done is skipped. Samples come from the kernel clock: CUDA events around a call with
a flushed L2, on a CPU the host clock.

A variant is prepared again for each turn and released after it, because what it holds (the graph of
a backward pass can be gigabytes of scores) must not take memory from the others. The first call of
a turn is never a sample: it runs with the allocator state that the previous variant left.

A variant that raises is dropped and its error returned; the others continue.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field

import torch

from lmlab.measure.clock import collector_paused, synchronize
from lmlab.measure.cuda_events import EventSampler
from lmlab.measure.statistics import Measurement
from lmlab.measure.stop_rule import StopRule

Call = Callable[[], object]
Prepare = Callable[[], Call]

SAMPLES_PER_TURN = 10


@dataclass(frozen=True, kw_only=True)
class SamplingBudget:
    """How long each variant is sampled; see `StopRule`."""

    min_samples: int = 10
    min_time_s: float = 0.01
    target_relative_deviation: float = 0.005
    max_samples: int = 40
    time_cap_s: float = 0.2
    """Over all turns of a variant; at least one sample is always taken."""


@dataclass
class _Variant:
    prepare: Prepare
    rule: StopRule
    samples: list[float] = field(default_factory=list)
    elapsed_s: float = 0.0
    stopped: str | None = None
    error: Exception | None = None

    def take_turn(self, device: torch.device) -> None:
        """A few more samples, as many as the remaining time allows."""
        started = time.perf_counter()
        call = self.prepare()
        call_s = _seconds(call, device)
        left_s = self.rule.time_cap_s - self.elapsed_s - (time.perf_counter() - started)
        fitting = max(1, int(left_s / max(call_s, 1e-9)))
        count = min(SAMPLES_PER_TURN, fitting, self.rule.max_samples - self.rule.n)
        for sample in _sampler(call, device)(count):
            self.samples.append(sample)
            self.rule.add(sample)
        self.elapsed_s += time.perf_counter() - started
        self.stopped = self.rule.reason(self.elapsed_s)

    def measurement(self, device: torch.device) -> Measurement:
        assert self.stopped is not None, "sampling ends when every variant has stopped"
        on_gpu = device.type == "cuda"
        return Measurement(
            samples_ms=tuple(self.samples),
            clock="events" if on_gpu else "wall",
            cache="cold" if on_gpu else "warm",
            stopped=self.stopped,
        )


def measure_in_rounds(
    variants: Mapping[str, Prepare], *, device: torch.device, budget: SamplingBudget
) -> tuple[dict[str, Measurement], dict[str, Exception]]:
    """Measurements of the variants that ran, and errors of those that raised."""
    rounds = {
        name: _Variant(prepare, StopRule(**asdict(budget))) for name, prepare in variants.items()
    }
    with collector_paused():
        while active := [each for each in rounds.values() if not each.stopped and not each.error]:
            for variant in active:
                try:
                    variant.take_turn(device)
                except Exception as error:
                    # Without its frames, which hold the tensors that filled the memory.
                    variant.error = error.with_traceback(None)
    return (
        {name: each.measurement(device) for name, each in rounds.items() if not each.error},
        {name: each.error for name, each in rounds.items() if each.error},
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
