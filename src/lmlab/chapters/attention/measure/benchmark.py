"""Every variant at one shape: forward, backward and both, by CUDA events, in one process.

Each variant runs once and is checked against a reference; a wrong one gets no time. Then its
memory and its launch time on the host are measured. Then, pass by pass, the variants take turns
until their times have settled (`lmlab.measure.kernel_clock`). `tiled` loops over its tiles in
Python, so its time is first extrapolated from a short sequence (by the ratio of lengths squared);
if that exceeds the cap, it is not started.

Records: `time` per variant and phase, `first_call_time` (compilation included), `error` per tensor,
`memory` per stage and `host_time` per phase (GPU only), `estimated_time` of a variant that loops in
Python, `flops` per phase, `threads`.
"""

from dataclasses import replace
from functools import partial

import torch

from lmlab.attention import registry
from lmlab.chapters.attention.measure import rounds
from lmlab.chapters.attention.measure.compiling import call_ms, compiler_for
from lmlab.chapters.attention.measure.problem import Attend, Problem, Shape, shape_of
from lmlab.chapters.attention.measure.variants import Variants
from lmlab.jobs.outcome import Outcome, Unsupported
from lmlab.measure.clock import collector_paused
from lmlab.measure.precision import tf32_allowed
from lmlab.study.points import Point

LOOPS_IN_PYTHON = frozenset({"tiled"})
PROBE = 512
"""Sequence from which the time of such a variant is estimated."""


def measure(point: Point, device: torch.device, make_problem: type[Problem] = Problem) -> Outcome:
    """Measure one shape."""
    settings = point.settings
    shape = shape_of({**settings, **point.parameters})
    variants = Variants(settings["variants"], device)

    def load(name: str) -> Attend:
        attend = partial(registry.load(name), is_causal=shape.is_causal)
        if name in LOOPS_IN_PYTHON and shape.sequence > PROBE:
            estimated_ms = estimate_ms(attend, shape, device)
            variants.note(name, "estimated_time", estimated_ms, "ms")
            if estimated_ms > 1e3 * settings["variant_cap_s"]:
                raise Unsupported(
                    "one forward and backward pass would exceed the time cap of "
                    f"{settings['variant_cap_s']:g} s, by its time over {PROBE} queries"
                )
        return attend

    # Pause the garbage collector once: a pause for each of many short measurements would add up.
    with (
        tf32_allowed(shape.tf32),
        compiler_for(settings["variants"], retain_graphs=True),
        collector_paused(),
    ):
        problem = make_problem(shape, device, settings["seed"])
        attends = rounds.try_all(variants, problem, load)
        for name in variants.running:
            with variants.attempt(name):
                rounds.note_memory(variants, name, attends[name], problem)
                rounds.note_host_time(variants, name, attends[name], problem)
        budget = rounds.sampling_budget(settings)
        rounds.time_passes(variants, attends, problem.passes(), budget)
    return variants.outcome(*rounds.flop_records(problem), rounds.thread_record())


def estimate_ms(attend: Attend, shape: Shape, device: torch.device) -> float:
    """Time of forward and backward, extrapolated from a short sequence."""
    both = Problem(replace(shape, sequence=PROBE), device, seed=0).passes()["both"](attend)
    call_ms(both, device)
    return call_ms(both, device) * (shape.sequence / PROBE) ** 2
