"""Activation checkpointing on one model: strategies as variants of one point, peak and time each.

Ratios of times are trustworthy only inside one process, so all strategies share one: same weights,
same optimizer, same batch, in rounds that visit every strategy. A visit empties the allocator (one
strategy's cached blocks fit another badly), runs one step to fill it again and times the next ones;
the peak is read from the timed steps, with no recording on. A CPU has no such counter, so there one
more step is recorded at the end.

Before anything is timed, each strategy's gradients are compared with those of the first one on a
short batch: a strategy that computes something else gets no time.

Records per `variant`, with its `kind` (none, every, nested) and the `blocks` of a segment: `time`,
`peak_memory`, `saved_for_backward` (what forward leaves: inputs of segments, and what the head and
the loss save), `predicted_peak` and `predicted_live`; the variant `best predicted` is the segment
that the cost model would choose. Once per point: `stream_bytes`, the size of one input.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from lmlab.chapters.memory.measure.records import (
    environment_records,
    outcome_of,
    predicted_records,
)
from lmlab.chapters.memory.measure.timeline import (
    drop_graph,
    empty_allocator,
    is_predictable,
    known_tensors,
    needs_more,
    stream_bytes,
    workload_for,
)
from lmlab.jobs.outcome import Outcome, Unsupported
from lmlab.jobs.workload import Step, Workload
from lmlab.measure.clock import collector_paused, synchronize
from lmlab.measure.device import is_out_of_memory, peak_memory_bytes
from lmlab.measure.memory.observer import Observer
from lmlab.measure.memory.recorder import record
from lmlab.measure.memory.replay import BEFORE, replay
from lmlab.measure.precision import tf32_allowed
from lmlab.measure.records import Record, timed, value, without_value
from lmlab.measure.statistics import Measurement
from lmlab.model import checkpoint_peak
from lmlab.model.checkpointing import Strategy, StrategyError, checkpointed, parse_strategy
from lmlab.model.loss import cross_entropy
from lmlab.study.points import Point
from lmlab.study.results import Status

CHECKED_TOKENS = 128
# Two runs of the same kernels differ by the order in which the embedding adds its rows.
SAME_GRADIENTS_WITHIN = 1e-3
BEST_PREDICTED = "best predicted"


@dataclass(kw_only=True)
class Variant:
    """One strategy and its measurements so far."""

    name: str
    strategy: Strategy
    samples_ms: list[float] = field(default_factory=list)
    peak_bytes: int = 0
    saved_bytes: int = 0
    status: Status = "ok"
    reason: str | None = None


def measure_strategies(point: Point, device: torch.device) -> Outcome:
    """Peak and step time of every strategy that the point names."""
    workload = workload_for(point)
    names = str(point.settings["strategies"]).split(",")
    variants = [Variant(name=name, strategy=parse_strategy(name)) for name in names]
    with tf32_allowed(workload.precision.tf32), collector_paused():
        model = workload.build(device)
        try:
            with checkpointed(model, variants[0].strategy):
                pass
        except StrategyError as error:
            raise Unsupported(str(error)) from error
        _compare_gradients(variants, workload, model, device)
        step = Step(workload, model, device)
        _run_rounds(variants, step, model, point, device)
        if device.type != "cuda":
            _record_peaks(variants, step, model, device)
        records = [
            value("stream_bytes", stream_bytes(workload.shape), "B"),
            *environment_records(),
            *(r for each in variants for r in variant_records(each)),
            *_predictions(variants, workload, device),
        ]
    endings = [(each.name, each.status, each.reason) for each in variants]
    return outcome_of(endings, records, {})


def variant_records(variant: Variant) -> list[Record]:
    """Time and memory of one strategy, or why it has neither."""
    labels = labels_of(variant.name, variant.strategy)
    if variant.status != "ok":
        reason = str(variant.reason)
        return [
            without_value(quantity, variant.status, reason, **labels)
            for quantity in ("time", "peak_memory")
        ]
    stopped = f"{len(variant.samples_ms)} samples"
    samples = Measurement(
        samples_ms=tuple(variant.samples_ms), clock="wall", cache="warm", stopped=stopped
    )
    return [
        timed(samples, "time", **labels),
        value("peak_memory", variant.peak_bytes, "B", **labels),
        value("saved_for_backward", variant.saved_bytes, "B", **labels),
    ]


def labels_of(name: str, strategy: Strategy) -> dict[str, str | int]:
    """Labels of a strategy's records."""
    return {"variant": name, "kind": strategy.kind, "blocks": strategy.blocks}


def _predictions(
    variants: list[Variant], workload: Workload, device: torch.device
) -> Iterator[Record]:
    """The cost model's peak of every strategy, and of the segment that it would choose."""
    if not is_predictable(workload):
        return
    shape = workload.shape
    precision: Any = workload.precision.name
    where: Any = device.type
    blocks, best = checkpoint_peak.best_segment(shape, precision, device=where)
    for each in variants:
        segment = each.strategy.blocks
        moment = (
            checkpoint_peak.predicted_peak_nested(shape, precision, device=where)
            if each.strategy.kind == "nested"
            else checkpoint_peak.predicted_peak_checkpointed(
                shape, precision, segment, device=where
            )
        )
        yield from predicted_records(moment, **labels_of(each.name, each.strategy))
    yield from predicted_records(best, **labels_of(BEST_PREDICTED, Strategy("every", blocks)))


def _run_rounds(
    variants: list[Variant], step: Step, model: nn.Module, point: Point, device: torch.device
) -> None:
    """Visit every variant in every round; after the time cap only those without a sample yet."""
    deadline = time.perf_counter() + point.settings["time_cap_s"]
    for _ in range(point.settings["rounds"]):
        for variant in variants:
            late = time.perf_counter() >= deadline
            if variant.status == "ok" and not (late and variant.samples_ms):
                _visit(variant, step, model, point.settings["steps"], device)


def _visit(
    variant: Variant, step: Step, model: nn.Module, steps: int, device: torch.device
) -> None:
    with _catching_oom(variant, step, device), checkpointed(model, variant.strategy):
        _fill_allocator(variant, step, device)
        for _ in range(steps):
            variant.samples_ms.append(_one_step_ms(step, device))
        variant.peak_bytes = max(variant.peak_bytes, peak_memory_bytes(device) or 0)


@contextmanager
def _catching_oom(variant: Variant, step: Step, device: torch.device) -> Iterator[None]:
    """Start from an emptied allocator; running out of memory becomes the variant's status."""
    step.zero_grad()
    empty_allocator(device)
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        variant.status = "oom"
        variant.reason = needs_more(None, peak_memory_bytes(device), "the step")
    if variant.status == "oom":  # the error, whose traceback kept tensors alive, is gone by now
        drop_graph(step)


def _fill_allocator(variant: Variant, step: Step, device: torch.device) -> None:
    """One untimed step, noting what its forward pass leaves."""
    for name, run in step.phases():
        before = _allocated(device)
        run()
        if name == "forward":
            variant.saved_bytes = _allocated(device) - before


def _allocated(device: torch.device) -> int:
    """Bytes of tensors now; a CPU does not count them."""
    return int(torch.cuda.memory_allocated(device)) if device.type == "cuda" else 0


def _one_step_ms(step: Step, device: torch.device) -> float:
    synchronize(device)
    start = time.perf_counter_ns()
    for _, run in step.phases():
        run()
    synchronize(device)
    return (time.perf_counter_ns() - start) / 1e6


def _record_peaks(
    variants: list[Variant], step: Step, model: nn.Module, device: torch.device
) -> None:
    """Without a peak counter, the peak comes from replaying one recorded step."""
    for variant in (each for each in variants if each.status == "ok"):
        step.zero_grad()
        with checkpointed(model, variant.strategy):
            recording = record(
                [phase for phase in step.phases() if phase[0] != "zero_grad"],
                device=device,
                identify=lambda: known_tensors(model, step),
                observer=Observer({}),
                observed=frozenset(),
            )
        replayed = replay(recording.history)
        totals = replayed.totals(lambda piece: piece.block_bytes)
        variant.peak_bytes = totals[replayed.peak_position(BEFORE, replayed.length) - BEFORE]
        forward = recording.phases[0]
        variant.saved_bytes = totals[forward.end - BEFORE] - totals[forward.start - BEFORE]


def _compare_gradients(
    variants: list[Variant], workload: Workload, model: nn.Module, device: torch.device
) -> None:
    """Fail every variant whose gradients are not those of the first."""
    expected: torch.Tensor | None = None
    for variant in variants:
        norms = _gradient_norms(variant, workload, model, device)
        if expected is None:
            expected = norms
        off = ((norms - expected).abs() / expected.clamp_min(1e-12)).max().item()
        if not off <= SAME_GRADIENTS_WITHIN:
            variant.status = "failed"
            variant.reason = f"gradients differ from those of {variants[0].name} by {off:.1e}"


def _gradient_norms(
    variant: Variant, workload: Workload, model: nn.Module, device: torch.device
) -> torch.Tensor:
    tokens, targets = (batch[:1, :CHECKED_TOKENS] for batch in workload.batch(device))
    precision = workload.precision
    with checkpointed(model, variant.strategy):
        with torch.autocast(device.type, dtype=precision.dtype, enabled=precision.autocast):
            loss = cross_entropy(model(tokens), targets)
        loss.backward()
    norms = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None])
    model.zero_grad(set_to_none=True)
    return norms.double().cpu()
