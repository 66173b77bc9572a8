"""Activation checkpointing on one model: strategies as arms of one point, peak and time of each.

A ratio of times is honest only inside one process, so all strategies share one: same weights, same
optimizer, same batch, in rounds that visit every strategy. A visit empties the allocator (one
strategy's cached blocks fit another badly), runs one step to fill it again, and times the next
ones; memory's peak is read from the timed steps, with no recording on. A CPU has no such counter,
so there one more step is recorded at the end.

Before anything is timed, each strategy's gradients are compared with those of the first one on a
short batch: a strategy that computes something else gets no time.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import nn

from lmlab.chapters.memory.measure.timeline import (
    GIB,
    STREAM_ELEMENT_BYTES,
    empty_allocator,
    forget_graph,
    known_tensors,
    workload_for,
)
from lmlab.jobs.outcome import Outcome, Unsupported
from lmlab.jobs.workload import OWN_ATTENTION, Step, Workload
from lmlab.measure.clock import collector_paused, synchronize
from lmlab.measure.device import is_out_of_memory, peak_memory_bytes
from lmlab.measure.memory.observer import Observer
from lmlab.measure.memory.recorder import record
from lmlab.measure.memory.replay import BEFORE, replay
from lmlab.measure.precision import tf32_allowed
from lmlab.measure.statistics import Measurement
from lmlab.model import checkpoint_peak
from lmlab.model.checkpointing import Strategy, StrategyError, checkpointed, parse_strategy
from lmlab.model.loss import cross_entropy
from lmlab.model.peak import Stage
from lmlab.study.points import Point

CHECKED_TOKENS = 128
# Two runs of the same kernels differ by the order in which the embedding adds its rows.
SAME_GRADIENTS_WITHIN = 1e-3


@dataclass(kw_only=True)
class Arm:
    """One strategy and what came of it so far."""

    name: str
    strategy: Strategy
    samples_ms: list[float] = field(default_factory=list)
    peak_bytes: int = 0
    kept_bytes: int = 0
    """What forward leaves for backward: inputs of segments, and what the head and the loss save."""
    status: str = "ok"
    reason: str | None = None

    def fail(self, status: str, reason: str) -> None:
        self.status, self.reason = status, reason


def measure_strategies(point: Point, device: torch.device) -> Outcome:
    """Peak and step time of every strategy that the point names."""
    workload = workload_for(point)
    names = str(point.settings["strategies"]).split(",")
    arms = [Arm(name=name, strategy=parse_strategy(name)) for name in names]
    with tf32_allowed(workload.precision.tf32), collector_paused():
        tf32 = torch.get_float32_matmul_precision() != "highest"
        model = workload.build(device)
        try:
            with checkpointed(model, arms[0].strategy):
                pass
        except StrategyError as error:
            raise Unsupported(str(error)) from error
        _compare_gradients(arms, workload, model, device)
        step = Step(workload, model, device)
        _run_rounds(arms, step, model, point, device)
        if device.type != "cuda":
            _record_peaks(arms, step, model, device)
    data = {
        "arms": [_described(arm, workload, device) for arm in arms],
        "num_layers": workload.shape.num_layers,
        "input_bytes": STREAM_ELEMENT_BYTES * workload.shape.tokens * workload.shape.d_model,
        "best_predicted": _best_predicted(workload, device),
        "tf32": tf32,
        "threads": torch.get_num_threads(),
    }
    return _outcome(arms, data)


def _outcome(arms: list[Arm], data: Mapping[str, Any]) -> Outcome:
    measured = {arm.name: _measurement(arm) for arm in arms if arm.status == "ok"}
    if measured:
        return Outcome(measurements=measured, data=data)
    return Outcome(status="oom", reason=f"{arms[0].name}: {arms[0].reason}", data=data)


def _measurement(arm: Arm) -> Measurement:
    return Measurement(
        samples_ms=tuple(arm.samples_ms),
        clock="host",
        cache="warm",
        stopped=f"{len(arm.samples_ms)} samples",
    )


def _run_rounds(
    arms: list[Arm], step: Step, model: nn.Module, point: Point, device: torch.device
) -> None:
    """Visit every arm in every round; after the time cap only those that have no sample yet."""
    deadline = time.perf_counter() + point.settings["time_cap_s"]
    for _ in range(point.settings["rounds"]):
        for arm in arms:
            late = time.perf_counter() >= deadline
            if arm.status == "ok" and not (late and arm.samples_ms):
                _visit(arm, step, model, point.settings["steps"], device)


def _visit(arm: Arm, step: Step, model: nn.Module, steps: int, device: torch.device) -> None:
    with _out_of_memory_kept(arm, step, device), checkpointed(model, arm.strategy):
        _fill_allocator(arm, step, device)
        for _ in range(steps):
            arm.samples_ms.append(_one_step_ms(step, device))
        arm.peak_bytes = max(arm.peak_bytes, peak_memory_bytes(device) or 0)


@contextmanager
def _out_of_memory_kept(arm: Arm, step: Step, device: torch.device) -> Iterator[None]:
    """Start from an emptied allocator; running out of memory becomes the arm's status."""
    step.zero_grad()
    empty_allocator(device)
    reason = None
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        held = peak_memory_bytes(device)
        held_words = "" if held is None else f" with up to {held / GIB:.2f} GiB live"
        reason = f"did not fit{held_words}"
    if reason is not None:  # and the error is gone, with all that its traceback held
        forget_graph(step)
        arm.fail("oom", reason)


def _fill_allocator(arm: Arm, step: Step, device: torch.device) -> None:
    """One step untimed, with a look at what its forward pass leaves."""
    for name, run in step.phases():
        before = _allocated(device)
        run()
        if name == "forward":
            arm.kept_bytes = _allocated(device) - before


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


def _record_peaks(arms: list[Arm], step: Step, model: nn.Module, device: torch.device) -> None:
    """Where no counter keeps the peak, the replay of one recorded step gives it."""
    for arm in (arm for arm in arms if arm.status == "ok"):
        step.zero_grad()
        with checkpointed(model, arm.strategy):
            recording = record(
                [phase for phase in step.phases() if phase[0] != "zero_grad"],
                device=device,
                identify=lambda: known_tensors(model, step),
                observer=Observer({}),
                observed=frozenset(),
            )
        replayed = replay(recording.history)
        totals = replayed.totals(lambda piece: piece.block_bytes)
        arm.peak_bytes = totals[replayed.peak_position(BEFORE, replayed.length) - BEFORE]
        forward = recording.phases[0]
        arm.kept_bytes = totals[forward.end - BEFORE] - totals[forward.start - BEFORE]


def _compare_gradients(
    arms: list[Arm], workload: Workload, model: nn.Module, device: torch.device
) -> None:
    """Fail every arm whose gradients are not those of the first."""
    expected: torch.Tensor | None = None
    for arm in arms:
        norms = _gradient_norms(arm, workload, model, device)
        if expected is None:
            expected = norms
        off = ((norms - expected).abs() / expected.clamp_min(1e-12)).max().item()
        if not off <= SAME_GRADIENTS_WITHIN:
            arm.fail("failed", f"gradients differ from those of {arms[0].name} by {off:.1e}")


def _gradient_norms(
    arm: Arm, workload: Workload, model: nn.Module, device: torch.device
) -> torch.Tensor:
    tokens, targets = (batch[:1, :CHECKED_TOKENS] for batch in workload.batch(device))
    precision = workload.precision
    with checkpointed(model, arm.strategy):
        with torch.autocast(device.type, dtype=precision.dtype, enabled=precision.autocast):
            loss = cross_entropy(model(tokens), targets)
        loss.backward()
    norms = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None])
    model.zero_grad(set_to_none=True)
    return norms.double().cpu()


def _described(arm: Arm, workload: Workload, device: torch.device) -> dict[str, Any]:
    predicted = _predicted(arm.strategy, workload, device)
    ok = arm.status == "ok"
    return {
        "name": arm.name,
        "kind": arm.strategy.kind,
        "blocks": arm.strategy.blocks,
        "status": arm.status,
        "reason": arm.reason,
        "peak_bytes": arm.peak_bytes if ok else None,
        "kept_bytes": arm.kept_bytes if ok else None,
        "median_ms": statistics.median(arm.samples_ms) if ok else None,
        "predicted": predicted,
    }


def _predicted(
    strategy: Strategy, workload: Workload, device: torch.device
) -> dict[str, Any] | None:
    if not _describes(workload):
        return None
    name: Any = workload.precision.name
    where: Any = device.type
    if strategy.kind == "nested":
        moment = checkpoint_peak.predicted_peak_nested(workload.shape, name, device=where)
    else:
        moment = checkpoint_peak.predicted_peak_checkpointed(
            workload.shape, name, strategy.blocks, device=where
        )
    return _moment(moment)


def _best_predicted(workload: Workload, device: torch.device) -> dict[str, Any] | None:
    if not _describes(workload):
        return None
    name: Any = workload.precision.name
    where: Any = device.type
    blocks, moment = checkpoint_peak.best_segment(workload.shape, name, device=where)
    return {"blocks": blocks, **_moment(moment)}


def _describes(workload: Workload) -> bool:
    """Whether the cost model speaks of this model."""
    return workload.is_ours and workload.attention == OWN_ATTENTION


def _moment(moment: Stage) -> dict[str, Any]:
    return {
        "bytes": moment.parts.total,
        "phase": moment.phase,
        "moment": moment.name,
        "categories_bytes": asdict(moment.parts),
    }
