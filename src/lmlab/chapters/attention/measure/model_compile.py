"""The whole model through torch.compile against the model as it is: one graph, forward and back.

The compiled model is the same parameters behind another call, so that both arms share everything
and take turns step by step, by the host's clock. The first step of the compiled arm contains the
compilation, with caches that start empty, and is timed apart. The forward pass is that of training:
it keeps what backward needs (inference would be another graph and another compilation). The
optimizer is not compiled.

`measurements`: `arm.forward`, `arm.forward_backward` and `arm.train_step`, where the latter two are
the sums of the phases of each step. `data`: `arms` with `loss`, `first_step_s` and
`peak_memory_bytes` (null on a CPU), `attention_replaced` (how often the compiler has put PyTorch's
fused attention in place of the model's), `tokens_per_step`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from lmlab.chapters.attention.measure.compiling import attention_replaced, compiler, first_call_s
from lmlab.chapters.attention.measure.switch import Bench, Switch, check_loss
from lmlab.chapters.attention.measure.variants import Arms, finite, refuse_unsupported
from lmlab.jobs.outcome import Outcome, Unsupported
from lmlab.jobs.workload import Workload, workload_of
from lmlab.measure.clock import PhaseClock, measure_steps
from lmlab.measure.device import peak_memory_bytes, reset_peak_memory
from lmlab.measure.precision import tf32_allowed, why_unsupported
from lmlab.measure.statistics import Measurement
from lmlab.study.points import Point

EAGER, COMPILED = "eager", "compiled"
SUMS = {
    "forward": ("forward",),
    "forward_backward": ("forward", "backward"),
    "train_step": ("zero_grad", "forward", "backward", "optimizer"),
}


def measure(point: Point, device: torch.device) -> Outcome:
    """Race the two arms inside one model."""
    workload = workload_of(point)
    if reason := why_unsupported(workload.precision.name, device):
        raise Unsupported(reason)
    arms = Arms((EAGER, COMPILED), device)
    with tf32_allowed(workload.precision.tf32), compiler(cold=True, in_parallel=True):
        model = workload.build(device)
        bench = Bench(workload, Switch(model, ways(model)), device)
        for name in (EAGER, COMPILED):
            with arms.attempt(name):
                try_out(name, bench, arms, workload, device)
            if name not in arms.running:
                bench.renew()
        measurements = time_steps(bench, arms.running, point, device) if arms.running else {}
    data = {"tokens_per_step": workload.shape.tokens, "threads": torch.get_num_threads()}
    return arms.outcome(measurements, data)


def ways(model: nn.Module) -> dict[str, Callable[[Tensor], Tensor]]:
    """The model as it is, and as one compiled graph for this shape alone."""
    return {EAGER: model, COMPILED: torch.compile(model, fullgraph=True, dynamic=False)}


def try_out(name: str, bench: Bench, arms: Arms, workload: Workload, device: torch.device) -> None:
    """Check an arm's loss against the eager one and note its first step and its peak memory."""
    if name == COMPILED:
        refuse_without_compiler(workload, device)
    arms.note(name, first_step_s=first_call_s(lambda: bench.run(name), device))
    # The step above has moved the weights, so both losses are taken after it.
    loss = bench.loss(name)
    arms.note(name, loss=finite(loss))
    if EAGER in arms.running:
        check_loss(loss, bench.loss(EAGER), workload.precision.name)
    if name == COMPILED:
        arms.note(name, attention_replaced=attention_replaced())
    reset_peak_memory(device)
    bench.run(name)
    arms.note(name, peak_memory_bytes=peak_memory_bytes(device))


def refuse_without_compiler(workload: Workload, device: torch.device) -> None:
    """Raise `Unsupported` where nothing can be compiled."""
    head_dim = workload.shape.d_model // workload.shape.num_heads
    refuse_unsupported("compiled", device, workload.precision.dtype, head_dim)


def time_steps(
    bench: Bench, names: Sequence[str], point: Point, device: torch.device
) -> dict[str, Measurement]:
    """Train steps phase by phase, an arm after the other, and the sums that the study asks for."""

    def one_step(clock: PhaseClock) -> None:
        for name in names:
            for phase, run in bench.phases(name):
                with clock.phase(f"{name}.{phase}"):
                    run()

    phases = measure_steps(
        one_step,
        device=device,
        warmup=point.settings["warmup"],
        steps=point.settings["steps"],
        time_cap_s=point.settings["time_cap_s"],
    ).phases
    return {
        f"{name}.{total}": summed([phases[f"{name}.{part}"] for part in parts])
        for name in names
        for total, parts in SUMS.items()
    }


def summed(parts: Sequence[Measurement]) -> Measurement:
    """Step by step the sum of some phases."""
    samples = zip(*(part.samples_ms for part in parts), strict=True)
    return replace(parts[0], samples_ms=tuple(map(sum, samples)))
