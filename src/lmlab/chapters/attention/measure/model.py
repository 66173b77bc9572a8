"""A training step of the model with one attention and with another: its time and peak memory.

The variants share model, optimizer and batch and alternate step by step, by wall clock. Before that
the loss of each is compared with that of the first, and one step of each gives its peak memory. A
variant that runs out of memory is dropped; the rest go on.

Records: `time` per variant (phase train_step) by wall and device clock, `round_time` (all
variants), `loss`, `peak_memory` (GPU only), `tokens`, `threads`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from lmlab.attention import registry
from lmlab.chapters.attention.measure.rounds import alternate, thread_record
from lmlab.chapters.attention.measure.shared_model import SharedStep, Switch, check_loss
from lmlab.chapters.attention.measure.variants import Variants, refuse_unsupported
from lmlab.jobs.outcome import TOTAL, Outcome, Unsupported
from lmlab.jobs.workload import Workload, workload_of
from lmlab.measure.clock import PhaseClock
from lmlab.measure.device_time import device_times
from lmlab.measure.precision import tf32_allowed, why_unsupported
from lmlab.measure.records import timed, value
from lmlab.model.transformer import CausalSelfAttention
from lmlab.study.points import Point


def measure(point: Point, device: torch.device) -> Outcome:
    """Compare the variants inside one model."""
    names = point.settings["variants"]
    workload = workload_of(point)
    if reason := why_unsupported(workload.precision.name, device):
        raise Unsupported(reason)
    variants = Variants(names, device)
    with tf32_allowed(workload.precision.tf32):
        model = workload.build(device)
        forwards = {name: with_attention(model, name) for name in names}
        step = SharedStep(workload, Switch(model, forwards), device)
        check_losses(variants, step, workload, device)
        for name in variants.running:
            with variants.attempt(name):
                step.run(name)  # creates the optimizer state
                variants.note(name, "peak_memory", step.peak_bytes(name), "B")
            if name not in variants.running:
                step.rebuild()
        if running := variants.running:
            times = alternate(partial(one_round, step, running), point.settings, device)
            variants.records.append(timed(times.pop(TOTAL), "round_time", phase=TOTAL))
            for name, measurement in times.items():
                variants.time(name, measurement, phase="train_step")
            for name, measurement in device_times(step.whole_steps(running), device).items():
                if name != TOTAL:
                    variants.time(name, measurement, phase="train_step")
    return variants.outcome(value("tokens", workload.shape.tokens, ""), thread_record())


def with_attention(model: nn.Module, name: str) -> Callable[[Tensor], Tensor]:
    """The model with this attention in all its layers, set at every call."""

    def forward(tokens: Tensor) -> Tensor:
        layers = [module for module in model.modules() if isinstance(module, CausalSelfAttention)]
        if not layers:
            raise Unsupported("attention can be exchanged in the study's own model only")
        attention = registry.load(name)
        for layer in layers:
            layer.attention = attention
        logits: Tensor = model(tokens)
        return logits

    return forward


def check_losses(
    variants: Variants, step: SharedStep, workload: Workload, device: torch.device
) -> None:
    """Compare every loss with that of the first variant that has one; weights do not change."""
    head_dim = workload.shape.d_model // workload.shape.num_heads
    expected = math.nan
    for name in variants.running:
        with variants.attempt(name):
            refuse_unsupported(name, device, workload.precision.dtype, head_dim)
            loss = step.loss(name)
            variants.note(name, "loss", loss, "")
            expected = loss if math.isnan(expected) else expected
            check_loss(loss, expected, workload.precision.name)


def one_round(step: SharedStep, names: list[str], clock: PhaseClock) -> None:
    """One whole training step of each variant."""
    for name in names:
        with clock.phase(name):
            step.run(name)
