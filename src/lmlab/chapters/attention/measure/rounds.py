"""Fair comparison of variants: each is checked first, then all are timed alternately.

Correctness comes before speed: a variant whose output or gradients are wrong is stopped before it
is timed. The first call, which includes any compilation, is recorded separately. Kernels are timed
by CUDA events (`time_passes`), steps by wall clock (`alternate`).

Memory counts this problem alone: its tensors and what a variant allocates on top. Host time ends
when the call returns, while the GPU is still working: where it exceeds GPU time, launching is the
bottleneck. It is measured with the device idle, so that waiting for a full queue does not count.
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lmlab.chapters.attention.measure.compiling import call_ms
from lmlab.chapters.attention.measure.problem import Attend, Problem, check, errors
from lmlab.chapters.attention.measure.variants import Variants, refuse_unsupported
from lmlab.measure.clock import PhaseClock, measure_steps, synchronize
from lmlab.measure.device import peak_memory_bytes, reset_peak_memory
from lmlab.measure.kernel_clock import Call, Prepare, measure_in_rounds
from lmlab.measure.records import Label, Record, value
from lmlab.measure.statistics import Measurement
from lmlab.measure.stop_rule import SamplingBudget
from lmlab.measure.time_spent import measuring

Passes = Mapping[str, Callable[[Attend], Call]]

MOST_CALLS, LONGEST_S = 10, 0.05
"""Of a variant whose host time is taken."""


def sampling_budget(settings: Mapping[str, Any]) -> SamplingBudget:
    """How long each variant is sampled."""
    samples = settings["samples"]
    return SamplingBudget(
        min_samples=min(10, samples), max_samples=samples, time_cap_s=settings["variant_cap_s"]
    )


def try_all(
    variants: Variants, problem: Problem, load: Callable[[str], Attend]
) -> dict[str, Attend]:
    """Run every variant once and check its numbers; return those that pass."""
    shape, expected = problem.shape, problem.reference()
    attends: dict[str, Attend] = {}
    for name in variants.running:
        with variants.attempt(name):
            refuse_unsupported(name, variants.device, shape.dtype, shape.head_dim)
            attends[name] = load(name)
            _try_out(variants, name, attends[name], problem, expected)
    return {name: attends[name] for name in variants.running}


def _try_out(
    variants: Variants, name: str, attend: Attend, problem: Problem, expected: Sequence[Tensor]
) -> None:
    found: list[Tensor] = []

    def first_call() -> None:
        output = attend(*problem.inputs)
        found.extend((output, *problem.gradients(output)))

    variants.note(name, "first_call_time", call_ms(first_call, variants.device), "ms")
    check_errors(variants, name, errors(found, expected), problem.shape.dtype)


def check_errors(
    variants: Variants, name: str, found: Mapping[str, float], dtype: torch.dtype
) -> None:
    """Record the errors of a variant; raise if one is larger than its dtype allows."""
    for tensor, error in found.items():
        variants.note(name, "error", error, "", tensor=tensor)
    check(found, dtype)


def note_memory(variants: Variants, name: str, attend: Attend, problem: Problem) -> None:
    """Record `memory` of a variant: the forward peak, what is left before backward, and the overall
    peak; nothing on a CPU, which has no such statistics."""
    device = variants.device
    if device.type != "cuda":
        return
    torch.cuda.synchronize(device)
    own = sum(x.nbytes for x in (*problem.inputs, problem.grad_o))
    others = int(torch.cuda.memory_allocated(device)) - own
    reset_peak_memory(device)
    output = attend(*problem.inputs)
    stages = {"forward_peak": peak_memory_bytes(device) or 0}
    stages["before_backward"] = int(torch.cuda.memory_allocated(device))
    problem.gradients(output)
    stages["peak"] = peak_memory_bytes(device) or 0
    for stage, held in stages.items():
        variants.note(name, "memory", held - others, "B", stage=stage)


@measuring()
def note_host_time(variants: Variants, name: str, attend: Attend, problem: Problem) -> None:
    """Record `host_time` of a variant by pass; nothing on a CPU, where the host does the work."""
    device = variants.device
    if device.type != "cuda":
        return
    for phase, prepare in problem.passes().items():
        call = prepare(attend)
        call()
        times: list[float] = []
        while len(times) < MOST_CALLS and sum(times) < LONGEST_S:
            synchronize(device)
            before = time.perf_counter()
            call()
            times.append(time.perf_counter() - before)
        synchronize(device)
        variants.note(name, "host_time", 1e3 * statistics.median(times), "ms", phase=phase)


def time_passes(
    variants: Variants, attends: Mapping[str, Attend], passes: Passes, budget: SamplingBudget
) -> None:
    """Time pass after pass; in each, the variants that still run take turns."""
    for phase, prepare in passes.items():
        calls = {name: partial(prepare, attends[name]) for name in variants.running}
        sample_in_turns(variants, calls, budget, phase=phase)


def sample_in_turns(
    variants: Variants, calls: Mapping[str, Prepare], budget: SamplingBudget, **labels: Label
) -> None:
    """Time a call of each variant by CUDA events, interleaved; a variant that raises is stopped."""
    times, broken = measure_in_rounds(calls, device=variants.device, budget=budget)
    for name, measurement in times.items():
        variants.time(name, measurement, **labels)
    for name, error in broken.items():
        variants.stop(name, error)


def alternate(
    step: Callable[[PhaseClock], None], settings: Mapping[str, Any], device: torch.device
) -> dict[str, Measurement]:
    """Repeat a step that runs every variant once; return times by phase name."""
    limits = {key: settings[key] for key in ("warmup", "steps", "time_cap_s")}
    return measure_steps(step, device=device, **limits).phases


def flop_records(problem: Problem, **labels: Label) -> list[Record]:
    """FLOPs of each pass."""
    flops = problem.shape.flops()
    return [value("flops", count, "FLOP", phase=phase, **labels) for phase, count in flops.items()]


def thread_record() -> Record:
    """Number of host threads."""
    return value("threads", torch.get_num_threads(), "")
