"""The whole model through torch.compile against the eager model: one graph, forward and backward.

The compiled model has the same parameters, so both variants share everything and alternate step by
step, by wall clock. The first compiled step contains the compilation, with cold caches, and is
recorded apart. The forward pass is that of training, which saves what backward needs (inference
would be another graph and another compilation). The optimizer is not compiled.

Records: `time` per variant and phase (forward, forward_backward, train_step: sums over the phases
of a step) by wall and device clock, `first_step_time`, `loss`, `peak_memory` (GPU only),
`attention_replaced` (how often the compiler substituted fused attention), `tokens`, `threads`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch

from lmlab.chapters.attention.measure.compiling import attention_replaced, call_ms, compiler
from lmlab.chapters.attention.measure.rounds import alternate, thread_record
from lmlab.chapters.attention.measure.shared_model import SharedStep, Switch, check_loss
from lmlab.chapters.attention.measure.variants import Variants, refuse_unsupported
from lmlab.jobs.outcome import Outcome, Unsupported
from lmlab.jobs.workload import Workload, workload_of
from lmlab.measure.clock import PhaseClock
from lmlab.measure.device_time import device_times
from lmlab.measure.precision import tf32_allowed, why_unsupported
from lmlab.measure.records import value
from lmlab.measure.statistics import Measurement
from lmlab.study.points import Point

EAGER, COMPILED = "eager", "compiled"
SUMS = {
    "forward": ("forward",),
    "forward_backward": ("forward", "backward"),
    "train_step": ("zero_grad", "forward", "backward", "optimizer"),
}


def measure(point: Point, device: torch.device) -> Outcome:
    """Compare the eager and the compiled model."""
    workload = workload_of(point)
    if reason := why_unsupported(workload.precision.name, device):
        raise Unsupported(reason)
    variants = Variants((EAGER, COMPILED), device)
    with tf32_allowed(workload.precision.tf32), compiler(cold=True, in_parallel=True):
        model = workload.build(device)
        compiled = torch.compile(model, fullgraph=True, dynamic=False)
        step = SharedStep(workload, Switch(model, {EAGER: model, COMPILED: compiled}), device)
        for name in (EAGER, COMPILED):
            with variants.attempt(name):
                try_out(name, step, variants, workload, device)
            if name not in variants.running:
                step.rebuild()
        if running := variants.running:
            times = alternate(partial(one_round, step, running), point.settings, device)
            for name in running:
                device_time = device_times(step.phases(name), device)
                for phase, parts in SUMS.items():
                    total = summed([times[f"{name}.{part}"] for part in parts])
                    variants.time(name, total, phase=phase)
                    if device_time:
                        busy = summed([device_time[part] for part in parts])
                        variants.time(name, busy, phase=phase)
    return variants.outcome(value("tokens", workload.shape.tokens, ""), thread_record())


def try_out(
    name: str, step: SharedStep, variants: Variants, workload: Workload, device: torch.device
) -> None:
    """Record first step, loss and peak memory; raise if the loss is not the eager one."""
    if name == COMPILED:
        head_dim = workload.shape.d_model // workload.shape.num_heads
        refuse_unsupported("compiled", device, workload.precision.dtype, head_dim)
    variants.note(name, "first_step_time", call_ms(lambda: step.run(name), device), "ms")
    # That step changed the weights, so both losses are taken after it.
    loss = step.loss(name)
    variants.note(name, "loss", loss, "")
    if EAGER in variants.running:
        check_loss(loss, step.loss(EAGER), workload.precision.name)
    if name == COMPILED:
        variants.note(name, "attention_replaced", attention_replaced(), "")
    variants.note(name, "peak_memory", step.peak_bytes(name), "B")


def one_round(step: SharedStep, names: Sequence[str], clock: PhaseClock) -> None:
    """One training step of each variant, phase by phase."""
    for name in names:
        for phase, run in step.phases(name):
            with clock.phase(f"{name}.{phase}"):
                run()


def summed(parts: Sequence[Measurement]) -> Measurement:
    """The sum of some phases, step by step."""
    samples = zip(*(part.samples_ms for part in parts), strict=True)
    return replace(parts[0], samples_ms=tuple(map(sum, samples)))
