"""The one shape with published results: `o = attention(q, k, v); o.sum().backward()`, compiled.

Batch 1, sixteen heads, 16,384 tokens, bf16, causal, through torch.compile as inside a compiled
model; variants that compile themselves are taken as they are. The gradient of a sum is an expanded
tensor of ones (stride zero), which a kernel must handle. No gradient is accumulated.

Sampling stops once the time has settled. The leaderboard's own protocol is sustained load, Triton's
`do_bench(rep=10_000, warmup=1_000)`, under which a GPU gets hotter and clocks lower. At the end,
some variants are also measured that way, one after the other.

Records: `time` per variant and phase, `sustained_time` per variant that the point names (evenly
thinned samples of the whole run), `first_call_time`, `error` per tensor, `flops` per phase.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from lmlab.attention import registry
from lmlab.chapters.attention.measure import rounds
from lmlab.chapters.attention.measure.compiling import COMPILES, compiler
from lmlab.chapters.attention.measure.problem import Attend, Problem, shape_of
from lmlab.chapters.attention.measure.variants import Variants
from lmlab.jobs.outcome import Outcome, Unsupported
from lmlab.measure.clock import collector_paused
from lmlab.measure.precision import tf32_allowed
from lmlab.measure.records import timed
from lmlab.measure.statistics import Measurement
from lmlab.measure.time_spent import measuring
from lmlab.study.points import Point

UNTRACEABLE = frozenset({"flash_attn_4", "flash_attn_4_deterministic"})
"""Variants whose launches torch.compile cannot trace; they run as they are."""
MOST_SAMPLES = 500
"""Kept of the thousands that a sustained run takes."""


def measure(point: Point, device: torch.device) -> Outcome:
    """Compare the variants at the published shape."""
    settings = point.settings
    shape = shape_of({**settings, **point.parameters})
    if device.type != "cuda":
        raise Unsupported("a shape for GPUs: each pass would take a CPU minutes")
    variants = Variants(settings["variants"], device)
    with tf32_allowed(shape.tf32), compiler(retain_graphs=True), collector_paused():
        problem = Problem(shape, device, settings["seed"])
        # What autograd passes to attention when its output is summed.
        problem.grad_o = torch.ones((), device=device, dtype=shape.dtype).expand_as(problem.q)
        load = partial(compiled, is_causal=shape.is_causal)
        attends = rounds.try_all(variants, problem, load)
        passes: rounds.Passes = {**problem.passes(), "both": partial(forward_backward, problem)}
        rounds.time_passes(variants, attends, passes, rounds.sampling_budget(settings))
        for name in [each for each in settings["sustained_variants"] if each in variants.running]:
            with variants.attempt(name):
                times = sustained(forward_backward(problem, attends[name]), settings)
                record = timed(times, "sustained_time", variant=name, phase="both")
                variants.records.append(record)
    return variants.outcome(*rounds.flop_records(problem))


@measuring()
def sustained(call: Callable[[], object], settings: Mapping[str, Any]) -> Measurement:
    """A call timed by Triton's `do_bench` for as long as the leaderboard does."""
    from triton.testing import do_bench

    warmup, rep = settings["sustained_warmup_ms"], settings["sustained_rep_ms"]
    samples = do_bench(call, warmup=warmup, rep=rep, return_mode="all")
    stride = -(-len(samples) // MOST_SAMPLES)
    protocol = f"do_bench(rep={rep}, warmup={warmup}), {len(samples)} samples"
    return Measurement(
        samples_ms=tuple(samples[::stride]), clock="events", cache="cold", stopped=protocol
    )


def compiled(name: str, *, is_causal: bool) -> Attend:
    """A variant as one compiled graph for one shape, unless self-compiling or untraceable."""
    function: Any = registry.load(name)
    if name not in COMPILES | UNTRACEABLE:
        function = torch.compile(function, fullgraph=True, dynamic=False)
    return partial(function, is_causal=is_causal)


def forward_backward(problem: Problem, attend: Attend) -> Callable[[], object]:
    """What the leaderboard times."""

    def call() -> None:
        for tensor in problem.inputs:
            tensor.grad = None
        attend(*problem.inputs).sum().backward()

    return call
