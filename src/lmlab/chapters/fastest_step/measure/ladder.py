"""The ladder: from the plain fp32 training step to the fastest one, rung by rung.

Each rung is checked first (its loss and gradients against the first rung's, within a tolerance for
its precision), then timed in rounds that alternate it with the rung below and with the same rung on
other attentions. A rung that fails is recorded with its reason, and the next one builds on the last
that worked. `batch` tries larger batches until one does not fit or tokens per second stop rising,
and keeps the best; `checkpoint` does the same with those that did not fit. Steps that do not fit in
memory together are rebuilt for every round (`rebuilt`).

Records have the labels rung, precision, attention, batch_size, checkpoint and side (`rung`,
`before` for the one below it, `other` for another attention): `time` and `token_time` (ms per step
and per token; wall clock, and device time except for `before`). Without side: `part_time` (device
time of a step by kind of kernel), `compile_time` (by how much the first steps exceed a later one:
compilation, capture), `peak_memory`, `energy_per_token`, `loss_error` and `gradient_error` with
their `loss_tolerance` and `gradient_tolerance`, `flops` (matmuls of the model, causal half of
attention, recomputation not counted), `tokens`, and `tried_throughput` of every batch tried.
"""

import re
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity

from lmlab.chapters.attention.measure.compiling import call_ms, compiler
from lmlab.chapters.attention.measure.model import LOSS_TOLERANCE
from lmlab.chapters.attention.measure.rounds import alternate
from lmlab.chapters.attention.measure.variants import (
    Variants,
    WrongNumbers,
    allocated_bytes,
    free_memory,
)
from lmlab.chapters.fastest_step.measure.rungs import Rung, next_rung, refuse, shape_of
from lmlab.chapters.fastest_step.measure.trainer import RungStep, Trainer
from lmlab.jobs.outcome import Outcome, Unsupported, without_numbers
from lmlab.measure.busy import device_time
from lmlab.measure.clock import PhaseClock, synchronize
from lmlab.measure.device import is_out_of_memory, peak_memory_bytes, reset_peak_memory
from lmlab.measure.intervals import interval, is_gpu_work, length, profiled_events
from lmlab.measure.nvml import nvml_session, query, visible_gpu
from lmlab.measure.records import Record, timed
from lmlab.measure.rounds import round_order
from lmlab.measure.statistics import Measurement
from lmlab.measure.time_spent import measuring
from lmlab.measure.trace.kernel_names import MATMULS, family
from lmlab.model import cost, loading
from lmlab.study.points import Point

GRADIENT_TOLERANCE = {"fp32": 1e-3, "tf32": 1e-2, "bf16": 0.05}
"""Relative difference of all sampled gradients to fp32's, by precision."""
REBUILT_ROUNDS = 3
WORTHWHILE = 1.02
MISSES = 2
"""Larger batches are tried until so many in a row do not raise the tokens per second by so much."""
BELOW = "below"
OWN_PARTS = (("attention", r"flash_[fb]|sdpa|fmha|^delta_kernel"), ("loss", r"^loss_\w+_kernel"))
Note = Callable[[Variants, str, RungStep], None]


def measure(point: Point, device: torch.device) -> Outcome:
    """Climb the ladder with one model."""
    asked = {**point.settings, **point.parameters}
    if asked["model"] != loading.DEFAULT:
        raise Unsupported("rungs exchange parts of the study's own model; this is another one")
    # Loading the compiler takes a second.
    needs_compiler = "compile" in asked["rungs"]
    with compiler(cold=True, in_parallel=True) if needs_compiler else nullcontext():
        ladder = Ladder(Trainer(shape_of(asked), asked, device), asked)
        for name in asked["rungs"]:
            ladder.climb(name)
        ladder.time_device()
    return ladder.outcome()


def part_of(kernel: str) -> str:
    """What a kernel belongs to: fused attention, our loss, or a family of kernels."""
    own = (part for part, rule in OWN_PARTS if re.search(rule, kernel))
    return next(own, "matmul" if family(kernel) in MATMULS else family(kernel))


class Ladder:
    """The rungs measured so far, and what the next one builds on."""

    def __init__(self, trainer: Trainer, asked: Mapping[str, Any], start: Rung | None = None):
        self.rung = start or Rung()
        self.records: list[Record] = []
        self._trainer, self._asked, self._device = trainer, asked, trainer.device
        self._below: RungStep | None = None
        self._reference: tuple[float, list[Tensor]] | None = None
        self._full: list[int] = []
        """Batches, in copies of the first, that did not fit."""
        self._tried_ms: dict[int, float] = {}
        """What the first step of a batch took when it was tried."""
        self._timed: list[tuple[str, str, RungStep, bool]] = []
        """Steps with a wall time, by rung and name, and whether they were rebuilt for it."""

    def outcome(self) -> Outcome:
        """All records; if no rung worked, the status and reason of the first failure."""
        failed = next((record for record in self.records if record["status"] != "ok"), None)
        if self._below is None and failed is not None:
            return without_numbers(failed["status"], failed["reason"])
        return Outcome(measurements=self.records)

    def climb(self, name: str) -> None:
        """Measure the named rung on top of the last one that worked."""
        base = self._trainer.shape.batch
        larger = [batch // base for batch in self._asked["batches"] if batch > base]
        if name == "batch":
            self._take_best(name, larger, self.rung.checkpoint)
        elif name == "checkpoint":
            beyond = [copies for copies in larger if copies in self._full]
            self._take_best(name, beyond, self._asked["checkpoint"])
        else:
            self.take(next_rung(self.rung, name, self._asked["attentions"][0]))

    def take(self, rung: Rung, *, rebuilt: bool = False) -> None:
        """Check and time a rung; keep it if it works."""
        rungs = {rung.name: rung}
        if rung.attention == self._asked["attentions"][0]:
            for other in self._asked["attentions"][1:]:
                rungs[f"{rung.name}, {other}"] = replace(rung, attention=other)
        variants = self._variants(rungs)
        steps: dict[str, RungStep] = {}
        for name, each in rungs.items():
            with variants.attempt(name):
                steps[name] = self._prepare(variants, name, each)
                if rebuilt:
                    steps[name].close()
        if rung.name in steps:
            with variants.attempt(rung.name):
                rebuilt = self._time(rung.name, steps, rebuilt)
                for name, step in steps.items():
                    self._timed.append((rung.name, name, step, rebuilt))
                    self._aside("energy_per_token", name, step, self._note_energy)
                    if rebuilt:
                        step.close()
        self.records += variants.records
        if rung.name in steps and rung.name in variants.running:
            if self._below is not None:
                self._below.close()
            self.rung, self._below = rung, steps.pop(rung.name)
        for step in steps.values():
            step.close()

    def _variants(self, rungs: Mapping[str, Rung]) -> Variants:
        batch = self._trainer.shape.batch
        return Variants({name: each.labels(batch) for name, each in rungs.items()}, self._device)

    def _aside(self, quantity: str, name: str, step: RungStep, measure: Note) -> None:
        """Measure what a rung can do without; if that fails, the reason is recorded."""
        variants = self._variants({name: step.rung})
        with variants.attempt(name):
            measure(variants, name, step)
        self.records += [
            each if each["status"] == "ok" else {**each, "quantity": quantity}
            for each in variants.records
        ]

    def _take_best(self, name: str, candidates: list[int], checkpoint: str) -> None:
        """Try batches while they fit and get faster; take the one with most tokens per second."""
        if self._below is not None:
            self._below.close()
        larger = partial(replace, self.rung, name=name, checkpoint=checkpoint)
        rates: dict[int, float] = {}
        misses = 0
        for copies in candidates:
            rate = self._try(larger(copies=copies))
            if rate is None:
                # Checkpointing is worth trying only if the last batch that fit was still a gain.
                is_full = not misses and self.records[-1]["status"] == "oom"
                self._full = [each for each in candidates if is_full and each >= copies]
                break
            misses = 0 if rate > WORTHWHILE * max(rates.values(), default=0.0) else misses + 1
            rates[copies] = rate
            if misses == MISSES:
                break
        if rates:
            best = max(rates, key=lambda copies: rates[copies])
            self.take(larger(copies=best), rebuilt=True)
        else:
            variants = self._variants({name: replace(self.rung, name=name)})
            reason = "no larger batch fits" if candidates else "the best batch fits without it"
            variants.stop(name, Unsupported(reason))
            self.records += variants.records

    def _try(self, rung: Rung) -> float | None:
        """Tokens per second of a batch, or None if the attempt failed."""
        variants = self._variants({rung.name: rung})
        rate = None
        with variants.attempt(rung.name):
            step = RungStep(self._trainer, replace(rung, graph=False))
            self._tried_ms[rung.copies] = call_ms(step.run, self._device)
            rate = 1e3 * step.tokens / min(call_ms(step.run, self._device) for _ in range(2))
            variants.note(rung.name, "tried_throughput", rate, "1/s")
            step.close()
        self._trainer.drop_gradients()
        free_memory(self._device)
        self.records += [{**record, "quantity": "tried_throughput"} for record in variants.records]
        return rate

    def _prepare(self, variants: Variants, name: str, rung: Rung) -> RungStep:
        """Build a rung's step, check its numbers, and note what it costs besides time."""
        refuse(rung, self._asked, self._device)
        self._trainer.drop_gradients()
        free_memory(self._device)
        others = allocated_bytes(self._device) - self._trainer.shared_bytes(rung)
        step = RungStep(self._trainer, rung)
        first_ms = call_ms(step.run, self._device)
        if rung.attention == self.rung.attention:  # it may have been compiled when it was tried
            first_ms = max(first_ms, self._tried_ms.get(rung.copies, 0.0))
        reset_peak_memory(self._device)  # not after a capture: replays allocate nothing
        first_ms += call_ms(step.capture, self._device)
        later_ms = call_ms(step.run, self._device)
        peak = peak_memory_bytes(self._device)
        variants.note(name, "compile_time", max(first_ms - later_ms, 0.0), "ms")
        variants.note(name, "peak_memory", None if peak is None else peak - others, "B")
        self._check(variants, name, step)
        variants.note(name, "tokens", step.tokens, "")
        shape = replace(self._trainer.shape, batch=self._trainer.shape.batch * rung.copies)
        phases = cost.flops(shape, mode="train_step", convention="causal").values()
        variants.note(name, "flops", sum(phase["matmul"] for phase in phases), "FLOP")
        return step

    def _check(self, variants: Variants, name: str, step: RungStep) -> None:
        gradients, loss = step.gradients(), step.loss.item()
        if self._reference is None:
            self._reference = loss, gradients
        expected, references = self._reference
        loss_error = abs(loss / expected - 1)
        pairs = zip(gradients, references, strict=True)
        off = sum((ours - theirs).square().sum().item() for ours, theirs in pairs)
        gradient_error = (off / sum(each.square().sum().item() for each in references)) ** 0.5
        loss_limit = LOSS_TOLERANCE[step.rung.precision]
        gradient_limit = GRADIENT_TOLERANCE[step.rung.precision]
        variants.note(name, "loss_error", loss_error, "")
        variants.note(name, "gradient_error", gradient_error, "")
        variants.note(name, "loss_tolerance", loss_limit, "")
        variants.note(name, "gradient_tolerance", gradient_limit, "")
        if not (loss_error <= loss_limit and gradient_error <= gradient_limit):
            raise WrongNumbers(
                f"loss off by {loss_error:.1e} and gradients by {gradient_error:.1e} from fp32; "
                f"allowed: {loss_limit:.0e} and {gradient_limit:.0e}"
            )

    def _time(self, own: str, steps: Mapping[str, RungStep], rebuilt: bool) -> bool:
        """Time the rung, the one below and its other attentions; return whether it was rebuilt."""
        running = dict(steps) if self._below is None else {BELOW: self._below, **steps}
        times = None if rebuilt else self._rounds(running)
        rebuilt = times is None
        times = times or self._rebuilt_rounds(running)
        for name, measured in times.items():
            self._record(own, name, running[name], measured, rebuilt)
        return rebuilt

    @measuring()
    def time_device(self) -> None:
        """Record device times, after all wall times: profiling slows down later launches."""
        if self._below is not None:
            self._below.close()
        for own, name, step, rebuilt in self._timed:
            self._aside("device_time", name, step, partial(self._profile, own, rebuilt))
            step.close()

    def _profile(
        self, own: str, rebuilt: bool, variants: Variants, name: str, step: RungStep
    ) -> None:
        step.capture()
        measured = device_time(step.run, self._device)
        if measured is None:
            return
        self._record(own, name, step, measured, rebuilt)
        if name == own:
            by_part = defaultdict(list)
            for event in profiled_events(step.run, self._device, [ProfilerActivity.CUDA]):
                if is_gpu_work(event, self._device):
                    by_part[part_of(event.name())].append(interval(event))
            for part, work in by_part.items():
                variants.note(name, "part_time", length(work) / 1e6, "ms", part=part)

    def _record(
        self, own: str, name: str, step: RungStep, measured: Measurement, rebuilt: bool
    ) -> None:
        """Record times per step and per token, taken in the rounds of the rung `own`."""
        side = {BELOW: "before", own: "rung"}.get(name, "other")
        labels = step.rung.labels(self._trainer.shape.batch)
        labels |= {"rung": own, "side": side, "rebuilt": rebuilt}
        samples = tuple(ms / step.tokens for ms in measured.samples_ms)
        per_token = replace(measured, samples_ms=samples)
        self.records += [timed(measured, **labels), timed(per_token, "token_time", **labels)]

    def _rounds(self, running: Mapping[str, RungStep]) -> dict[str, Measurement] | None:
        """Alternate steps that are all in memory; None if they do not fit together."""
        numbers = count()

        def one_round(clock: PhaseClock) -> None:
            for name in round_order(list(running), next(numbers)):
                with clock.phase(name):
                    running[name].run()

        try:
            for step in running.values():
                step.capture()
            times = alternate(one_round, self._asked, self._device)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            return None
        return {name: times[name] for name in running}

    def _rebuilt_rounds(self, running: Mapping[str, RungStep]) -> dict[str, Measurement]:
        """Rounds in which each step has the memory to itself."""
        samples: dict[str, list[float]] = {name: [] for name in running}
        for step in running.values():
            step.close()
        for number in range(REBUILT_ROUNDS):
            for name in round_order(list(running), number):
                step = running[name]
                step.capture()
                step.run()
                samples[name].append(call_ms(step.run, self._device))
                step.close()
        stopped = f"{REBUILT_ROUNDS} rounds, rebuilt for each"
        measured = partial(Measurement, clock="wall", cache="warm", stopped=stopped)
        return {name: measured(samples_ms=tuple(found)) for name, found in samples.items()}

    @measuring()
    def _note_energy(self, variants: Variants, name: str, step: RungStep) -> None:
        """Energy per token over a window long enough for the driver's counter."""
        if self._device.type != "cuda" or not self._asked["energy_s"]:
            return
        with nvml_session() as nvml:
            gpu = visible_gpu(nvml, self._device.index or 0)
            if nvml is None or gpu is None:
                return
            read = partial(query, nvml, nvml.nvmlDeviceGetTotalEnergyConsumption, gpu.handle)
            step.capture()
            step.run()
            synchronize(self._device)
            before, began, steps = read(), time.perf_counter(), 0
            while time.perf_counter() - began < self._asked["energy_s"]:
                step.run()
                synchronize(self._device)
                steps += 1
            after = read()
        if before is not None and after is not None:
            joules = (after - before) / 1e3
            variants.note(name, "energy_per_token", joules / (steps * step.tokens), "J")
