"""A train step of the model with one attention and with another: its time and its peak memory.

The arms share model, optimizer and batch and take turns step by step, by the host's clock. Before
that each arm's loss is held against the first arm's, and one step of each says how much memory it
holds at most. An arm for which the memory does not suffice leaves the race; the rest go on.

`data`: `arms` with `loss` and `peak_memory_bytes` (null on a CPU), `tokens_per_step`, `threads`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from lmlab.attention import registry
from lmlab.attention.registry import Attention
from lmlab.chapters.attention.measure.switch import Bench, Switch, check_loss
from lmlab.chapters.attention.measure.variants import Arms, finite, refuse_unsupported
from lmlab.jobs.outcome import Outcome, Unsupported
from lmlab.jobs.workload import Workload, workload_of
from lmlab.measure.clock import PhaseClock, measure_steps
from lmlab.measure.device import peak_memory_bytes, reset_peak_memory
from lmlab.measure.precision import tf32_allowed, why_unsupported
from lmlab.measure.statistics import Measurement
from lmlab.model.transformer import CausalSelfAttention
from lmlab.study.points import Point


def measure(point: Point, device: torch.device) -> Outcome:
    """Race the variants inside one model."""
    names = point.settings["variants"]
    workload = workload_of(point)
    if reason := why_unsupported(workload.precision.name, device):
        raise Unsupported(reason)
    arms = Arms(names, device)
    with tf32_allowed(workload.precision.tf32):
        model = workload.build(device)
        ways = {name: partial(with_attention, model, _attention(name)) for name in names}
        bench = Bench(workload, Switch(model, ways), device)
        for name in names:
            with arms.attempt(name):
                refuse_in_model(name, workload, device)
                loss = bench.loss(name)
                arms.note(name, loss=finite(loss))
                check_loss(loss, right_loss(arms), workload.precision.name)
        for name in arms.running:
            with arms.attempt(name):
                arms.note(name, peak_memory_bytes=peak_of_a_step(name, bench, device))
            if name not in arms.running:
                bench.renew()
        measurements = time_steps(bench, arms.running, point, device) if arms.running else {}
    data = {"tokens_per_step": workload.shape.tokens, "threads": torch.get_num_threads()}
    return arms.outcome(measurements, data)


def _attention(name: str) -> Callable[[], Attention]:
    """Loaded when it first runs: a variant that this machine cannot import has said so by then."""
    return partial(registry.load, name)


def with_attention(model: nn.Module, load: Callable[[], Attention], tokens: Tensor) -> Tensor:
    """Logits of the model with this attention in all its layers."""
    layers = [module for module in model.modules() if isinstance(module, CausalSelfAttention)]
    if not layers:
        raise Unsupported("attention can be exchanged in the study's own model only")
    function = load()
    for layer in layers:
        layer.attention = function
    logits: Tensor = model(tokens)
    return logits


def refuse_in_model(name: str, workload: Workload, device: torch.device) -> None:
    """Raise `Unsupported` for a variant that does not take the model's heads here."""
    head_dim = workload.shape.d_model // workload.shape.num_heads
    refuse_unsupported(name, device, workload.precision.dtype, head_dim)


def right_loss(arms: Arms) -> float:
    """The loss by the first arm that has one; no step has moved the weights yet."""
    losses = (row.get("loss") for row in arms.rows.values())
    return next((loss for loss in losses if loss is not None), math.nan)


def peak_of_a_step(name: str, bench: Bench, device: torch.device) -> int | None:
    """The most that one train step holds, the optimizer's state included."""
    bench.run(name)  # makes that state, which stays
    reset_peak_memory(device)
    bench.run(name)
    return peak_memory_bytes(device)


def time_steps(
    bench: Bench, names: list[str], point: Point, device: torch.device
) -> dict[str, Measurement]:
    """Whole train steps, an arm after the other; `arm.train_step` to its samples."""

    def one_step(clock: PhaseClock) -> None:
        for name in names:
            with clock.phase(f"{name}.train_step"):
                bench.run(name)

    return measure_steps(
        one_step,
        device=device,
        warmup=point.settings["warmup"],
        steps=point.settings["steps"],
        time_cap_s=point.settings["time_cap_s"],
    ).phases
