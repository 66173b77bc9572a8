"""The kernel clock: CUDA events around a call, repeated until its time has settled (`stop_rule`).

Kernels can be shorter than the time it takes to launch them, so they are timed by the GPU's own
clock. Two effects would distort the time of a short kernel. Its inputs may still be in the L2 from
the previous repetition, unlike in a real step; so a buffer of at least twice the L2 is zeroed
before each repetition. And if the host is still preparing the launch when the GPU reaches the start
event, idle time counts as kernel time; so a kernel that only sleeps runs first, while the host
queues start event, call and end event. (nvbench uses a kernel that spins until the host releases
it; a bounded sleep cannot deadlock, but a call that takes the host longer to queue includes some
launch time again.) On a CPU the host clock is used and nothing is flushed.

Clocks and background load drift, so variants timed one after the other see different conditions.
`measure_in_rounds` interleaves them: a few samples each, round after round, until each variant's
stop rule is satisfied. A variant is prepared again for each turn and released after it, because its
state (an autograd graph can hold gigabytes of attention scores) must not take memory from the
others. The first call of a turn is never a sample: it runs with the allocator state that the
previous variant left. A variant that raises is dropped and its error returned.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from lmlab.measure.clock import collector_paused, synchronize
from lmlab.measure.statistics import Measurement
from lmlab.measure.stop_rule import SamplingBudget, StopRule
from lmlab.measure.time_spent import measuring

Call = Callable[[], object]
Prepare = Callable[[], Call]

SAMPLES_PER_TURN = 10
_MIN_FLUSH_BYTES = 256 * 2**20
# The sleep is counted in SM cycles. At 2 GHz, about the highest clock of any GPU, it lasts as long
# as requested; at a lower clock longer, which does no harm.
_CYCLES_PER_MS = 2e6
_MIN_SLEEP_MS, _MAX_SLEEP_MS = 20e-3, 10.0


@measuring()
def measure_kernel(
    fn: Call,
    *,
    device: torch.device,
    min_time_s: float = 0.1,
    time_cap_s: float = 5.0,
    max_samples: int = 10_000,
) -> Measurement:
    """Repeat `fn` until its time has settled and return every sample."""
    budget = SamplingBudget(min_time_s=min_time_s, time_cap_s=time_cap_s, max_samples=max_samples)
    measured, errors = measure_in_rounds({"": lambda: fn}, device=device, budget=budget)
    for error in errors.values():
        raise error
    return measured[""]


@measuring()
def measure_in_rounds(
    variants: Mapping[str, Prepare], *, device: torch.device, budget: SamplingBudget
) -> tuple[dict[str, Measurement], dict[str, Exception]]:
    """Interleave the variants; return measurements and, for those that raised, errors."""
    rounds = {name: _Variant(prepare, StopRule(budget)) for name, prepare in variants.items()}
    with collector_paused():
        while active := [each for each in rounds.values() if not each.stopped and not each.error]:
            for variant in active:
                try:
                    variant.take_turn(device)
                except Exception as error:
                    # The traceback's frames would keep the tensors that filled the memory alive.
                    variant.error = error.with_traceback(None)
    on_gpu = device.type == "cuda"
    measured = {
        name: Measurement(
            samples_ms=tuple(each.samples),
            clock="events" if on_gpu else "wall",
            cache="cold" if on_gpu else "warm",
            stopped=each.stopped,
        )
        for name, each in rounds.items()
        if each.stopped
    }
    return measured, {name: each.error for name, each in rounds.items() if each.error}


@dataclass
class _Variant:
    prepare: Prepare
    rule: StopRule
    samples: list[float] = field(default_factory=list)
    elapsed_s: float = 0.0
    stopped: str | None = None
    error: Exception | None = None

    def take_turn(self, device: torch.device) -> None:
        """Take up to `SAMPLES_PER_TURN` more samples, as the remaining time allows."""
        started = time.perf_counter()
        call = self.prepare()
        call_ms = _milliseconds(call, device)
        left_s = self.rule.budget.time_cap_s - self.elapsed_s - (time.perf_counter() - started)
        fitting = max(1, int(1e3 * left_s / max(call_ms, 1e-6)))
        count = min(SAMPLES_PER_TURN, fitting, self.rule.budget.max_samples - self.rule.n)
        if device.type == "cuda":
            samples = EventSampler(call, device)(count)
        else:
            samples = [_milliseconds(call, device) for _ in range(count)]
        for sample in samples:
            self.samples.append(sample)
            self.rule.add(sample)
        self.elapsed_s += time.perf_counter() - started
        self.stopped = self.rule.reason(self.elapsed_s)


def _milliseconds(call: Call, device: torch.device) -> float:
    """Time one call with the host clock."""
    before = time.perf_counter_ns()
    call()
    synchronize(device)
    return (time.perf_counter_ns() - before) / 1e6


class EventSampler:
    """Takes batches of samples by CUDA events; synchronizes once per batch."""

    def __init__(self, call: Call, device: torch.device) -> None:
        self._call = call
        self._device = device
        self._flush = _flush_buffer(device)
        # Twice the time the host needs to queue one call, within the bounds above.
        torch.cuda.synchronize(device)
        before = time.perf_counter()
        call()
        queued_ms = 1e3 * (time.perf_counter() - before)
        torch.cuda.synchronize(device)
        sleep_ms = min(max(2 * queued_ms, _MIN_SLEEP_MS), _MAX_SLEEP_MS)
        self._sleep_cycles = int(_CYCLES_PER_MS * sleep_ms)

    def __call__(self, count: int) -> list[float]:
        with torch.cuda.device(self._device):
            pairs = [self._queue_one() for _ in range(count)]
            torch.cuda.synchronize(self._device)
        return [start.elapsed_time(end) for start, end in pairs]

    def _queue_one(self) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        start = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        self._flush.zero_()
        torch.cuda._sleep(self._sleep_cycles)
        start.record()
        self._call()
        end.record()
        return start, end


def _flush_buffer(device: torch.device) -> torch.Tensor:
    """A buffer that evicts everything else from the L2 when written."""
    l2_bytes = getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0)
    size = max(2 * l2_bytes, _MIN_FLUSH_BYTES)
    return torch.empty(size, dtype=torch.uint8, device=device)
