"""Activation checkpointing on one model: peak memory and step time of every strategy.

All strategies share one process (weights, optimizer, batch), and each round visits every strategy.
A visit empties the allocator (blocks cached by one strategy suit another badly), runs one untimed
step to refill it, then times the next ones; the peak is that of the whole visit. Device time is
profiled at the end. A CPU has no peak counter, so one more step is recorded there. Before anything
is timed, gradient norms on a short batch are compared with those of the first strategy; a strategy
that differs is not timed.

Records per `variant`, with its `kind` (none, every, nested) and the `blocks` per segment: `time`,
`peak_memory`, `saved_for_backward` (held after forward: segment inputs, and what the head and the
loss save), `predicted_peak` and `predicted_live`; the variant `best predicted` is the segment
length that the cost model would choose. Once per point: `stream_bytes`, the size of one input.
"""

import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from itertools import product
from typing import Any

import torch

from lmlab.chapters.attention.measure.compiling import call_ms
from lmlab.chapters.attention.measure.variants import Variants, WrongNumbers, allocated_bytes
from lmlab.chapters.memory.measure import shared
from lmlab.jobs.outcome import Outcome, Unsupported
from lmlab.jobs.workload import Step, Workload, workload_of
from lmlab.measure.busy import device_time
from lmlab.measure.clock import collector_paused
from lmlab.measure.device import peak_memory_bytes
from lmlab.measure.memory.history import active_bytes, replay
from lmlab.measure.memory.recorder import record
from lmlab.measure.precision import tf32_allowed
from lmlab.measure.records import Record, value
from lmlab.measure.statistics import Measurement
from lmlab.measure.time_spent import measuring
from lmlab.model import checkpoint_peak
from lmlab.model.checkpointing import Strategy, StrategyError, checkpointed, parse_strategy
from lmlab.model.loss import cross_entropy
from lmlab.study.points import Point

CHECKED_TOKENS = 128
# Even identical runs differ: the embedding's backward adds rows in a nondeterministic order.
SAME_GRADIENTS_WITHIN = 1e-3
BEST_PREDICTED = "best predicted"


def measure(point: Point, device: torch.device) -> Outcome:
    """Peak and step time of every strategy that the point names."""
    workload = workload_of(point, mode="train_step")
    with tf32_allowed(workload.precision.tf32), collector_paused():
        compared = Compared(workload, str(point.settings["strategies"]).split(","), device)
        compared.check_gradients()
        compared.run_rounds(point.settings)
        if device.type == "cuda":
            compared.time_device()
        else:
            compared.record_peaks()
        return compared.outcome()


@dataclass
class Run:
    """One strategy and its measurements so far."""

    strategy: Strategy
    samples_ms: list[float] = field(default_factory=list)
    device_time: Measurement | None = None
    peak_bytes: int = 0
    saved_bytes: int = 0


class Compared:
    """One model under several strategies."""

    def __init__(self, workload: Workload, names: list[str], device: torch.device) -> None:
        self._workload, self._device = workload, device
        self._runs = {name: Run(parse_strategy(name)) for name in names}
        labels = {name: asdict(run.strategy) for name, run in self._runs.items()}
        self._variants = Variants(labels, device)
        self._profiled = Variants(labels, device)
        self._model = workload.build(device)
        try:
            with checkpointed(self._model, self._runs[names[0]].strategy):
                pass
        except StrategyError as error:
            raise Unsupported(str(error)) from error
        self._step = Step(workload, self._model, device)

    def check_gradients(self) -> None:
        """Stop every strategy whose gradient norms differ from those of the first."""
        found = {name: self.gradient_norms(run.strategy) for name, run in self._runs.items()}
        first, expected = next(iter(found.items()))
        for name, norms in found.items():
            off = ((norms - expected).abs() / expected.clamp_min(1e-12)).max().item()
            if not off <= SAME_GRADIENTS_WITHIN:
                reason = f"gradients differ from those of {first} by {off:.1e}"
                self._variants.stop(name, WrongNumbers(reason))

    def gradient_norms(self, strategy: Strategy) -> torch.Tensor:
        """The norm of every parameter's gradient, on a short batch."""
        batch = self._workload.batch(self._device)
        tokens, targets = (each[:1, :CHECKED_TOKENS] for each in batch)
        with checkpointed(self._model, strategy):
            with self._workload.precision_context(self._device):
                loss = cross_entropy(self._model(tokens), targets)
            loss.backward()
        weights = self._model.parameters()
        norms = torch.stack([p.grad.norm() for p in weights if p.grad is not None])
        self._model.zero_grad(set_to_none=True)
        return norms.double().cpu()

    @measuring()
    def run_rounds(self, settings: Mapping[str, Any]) -> None:
        """Visit every strategy in every round; after the time cap only those without a sample."""
        deadline = time.perf_counter() + settings["time_cap_s"]
        for _, (name, run) in product(range(settings["rounds"]), self._runs.items()):
            late = time.perf_counter() >= deadline
            if name not in self._variants.running or (late and run.samples_ms):
                continue
            with self._variants.attempt(name):
                self.visit(run, settings["steps"])

    def _start_over(self) -> None:
        """Release gradients, the graph of an unfinished step, and cached memory."""
        self._step.zero_grad()
        vars(self._step)["_loss"] = None
        shared.empty_allocator(self._device)

    def visit(self, run: Run, steps: int) -> None:
        """Run one untimed step, noting what its forward pass saves, then the timed steps."""
        self._start_over()
        with checkpointed(self._model, run.strategy):
            for name, phase in self._step.phases():
                before = allocated_bytes(self._device)
                phase()
                if name == "forward":
                    run.saved_bytes = allocated_bytes(self._device) - before
            for _ in range(steps):
                run.samples_ms.append(call_ms(self._one_step, self._device))
            run.peak_bytes = max(run.peak_bytes, peak_memory_bytes(self._device) or 0)

    @measuring()
    def time_device(self) -> None:
        """Device time of every strategy, when all wall times are known."""
        for name in self._variants.running:
            self._start_over()
            run = self._runs[name]
            with self._profiled.attempt(name), checkpointed(self._model, run.strategy):
                run.device_time = device_time(self._one_step, self._device)

    def _one_step(self) -> None:
        for _, phase in self._step.phases():
            phase()

    def record_peaks(self) -> None:
        """Without a peak counter, the peak comes from replaying one recorded step."""
        for name in self._variants.running:
            run, step = self._runs[name], self._step
            step.zero_grad()
            with checkpointed(self._model, run.strategy):
                recording = record(
                    step.phases()[1:],  # without zero_grad
                    device=self._device,
                    identify=lambda: shared.known_tensors(self._model, self._step),
                )
            events = len(recording.history.events)
            totals = active_bytes(replay(recording.history), events).tolist()
            forward = recording.phases[0]
            run.peak_bytes = max(totals)
            run.saved_bytes = totals[forward.end] - totals[forward.start]

    def outcome(self) -> Outcome:
        """Records of every strategy, in order: time and memory, or the reason it has neither."""
        variants, order = self._variants, list(self._runs)
        variants.records += [{**each, "quantity": "peak_memory"} for each in variants.records]
        for name in variants.running:
            run = self._runs[name]
            samples, stopped = tuple(run.samples_ms), f"{len(run.samples_ms)} samples"
            times = Measurement(samples_ms=samples, clock="wall", cache="warm", stopped=stopped)
            variants.time(name, times)
            if run.device_time:
                variants.time(name, run.device_time)
            variants.note(name, "peak_memory", run.peak_bytes, "B")
            variants.note(name, "saved_for_backward", run.saved_bytes, "B")
        failed = self._profiled.records  # their wall times stay
        variants.records += [{**each, "quantity": "device_time"} for each in failed]
        variants.records.sort(key=lambda each: order.index(each["labels"]["variant"]))
        stream = value("stream_bytes", shared.stream_bytes(self._workload.shape), "B")
        return variants.outcome(stream, *shared.environment_records(), *self._predictions())

    def _predictions(self) -> Iterator[Record]:
        """The cost model's peak of every strategy, and of the segment that it would choose."""
        asked = shared.for_cost_model(self._workload, self._device)
        if asked is None:
            return
        for name, run in self._runs.items():
            labels = asdict(run.strategy)
            moment = checkpoint_peak.predicted_peak(**asked, **labels)
            yield from shared.predicted_records(moment, variant=name, **labels)
        blocks, best = checkpoint_peak.best_segment(**asked)
        labels = asdict(Strategy("every", blocks))
        yield from shared.predicted_records(best, variant=BEST_PREDICTED, **labels)
