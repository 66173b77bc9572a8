"""Naive attention, eager and compiled: forward and backward time, and memory.

softmax(Q K^T / sqrt(d)) V writes every intermediate result to memory, among them tensors of batch x
sequence x sequence. The variants alternate in one loop, forward then backward, by wall clock.
Before that, each runs once to be checked (the first call includes compilation, with cold caches)
and once for its memory: the forward peak, what forward keeps for backward, and the overall peak.

Records: `time` per variant and phase, `round_time` (all variants), `first_call_time`, `error` per
tensor, `memory` per stage (forward_peak, before_backward, peak; GPU only, inputs included),
`saved_memory` (eager: what autograd saves beyond the inputs), `attention_replaced` (compiled: how
often the compiler substituted fused attention), `flops` per phase, `threads`.
"""

from collections.abc import Mapping
from functools import partial

import torch

from lmlab.attention import registry
from lmlab.chapters.attention.measure import rounds
from lmlab.chapters.attention.measure.compiling import COMPILES, attention_replaced, compiler_for
from lmlab.chapters.attention.measure.problem import Attend, Problem, shape_of
from lmlab.chapters.attention.measure.variants import Variants
from lmlab.chapters.saved_tensors import saved_storages
from lmlab.jobs.outcome import TOTAL, Outcome
from lmlab.measure.clock import PhaseClock
from lmlab.measure.precision import tf32_allowed
from lmlab.measure.records import timed
from lmlab.study.points import Point


def measure(point: Point, device: torch.device) -> Outcome:
    """Measure one shape."""
    settings = point.settings
    shape = shape_of({**settings, **point.parameters})
    variants = Variants(settings["variants"], device)

    def load(name: str) -> Attend:
        return partial(registry.load(name), is_causal=shape.is_causal)

    with tf32_allowed(shape.tf32), compiler_for(settings["variants"], cold=True):
        problem = Problem(shape, device, settings["seed"])
        attends = rounds.try_all(variants, problem, load)
        for name in variants.running:
            with variants.attempt(name):
                rounds.note_memory(variants, name, attends[name], problem)
                if name in COMPILES:
                    variants.note(name, "attention_replaced", attention_replaced(), "")
                else:  # hooks on saved tensors would trigger another compilation
                    saved = saved_storages(partial(attends[name], *problem.inputs), problem.inputs)
                    variants.note(name, "saved_memory", sum(saved.values()), "B")
        if running := {name: attends[name] for name in variants.running}:
            times = rounds.alternate(partial(one_round, running, problem), settings, device)
            variants.records.append(timed(times.pop(TOTAL), "round_time", phase=TOTAL))
            for key, measurement in times.items():
                name, phase = key.rsplit(".", 1)
                variants.time(name, measurement, phase=phase)
    return variants.outcome(*rounds.flop_records(problem), rounds.thread_record())


def one_round(attends: Mapping[str, Attend], problem: Problem, clock: PhaseClock) -> None:
    """Forward and backward of each variant."""
    for name, attend in attends.items():
        with clock.phase(f"{name}.forward"):
            output = attend(*problem.inputs)
        with clock.phase(f"{name}.backward"):
            gradients = problem.gradients(output)
        del output, gradients
