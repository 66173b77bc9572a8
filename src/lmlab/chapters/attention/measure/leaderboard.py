"""The one shape that others publish: `o = attention(q, k, v); o.sum().backward()`, compiled.

One batch, sixteen heads, 16,384 tokens, bf16, causal. Attention goes through torch.compile, as a
user would call it inside a compiled model; variants that compile by themselves are taken as they
are. The gradient of a sum is a tensor of ones that all lie at one address (stride zero), which a
kernel must cope with. Gradients are dropped before each pass, so none is added to an old one.

`data`: `flops` of each pass; `arms` with `errors` and `first_call_s`, compilation included.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from lmlab.attention import registry
from lmlab.chapters.attention.measure.compiling import COMPILES, compiler
from lmlab.chapters.attention.measure.problem import Attend, Problem, shape_of
from lmlab.chapters.attention.measure.race import Passes, patience_of, race, try_out
from lmlab.chapters.attention.measure.reference import reference
from lmlab.chapters.attention.measure.variants import Arms, refuse_unsupported
from lmlab.jobs.outcome import Outcome, Unsupported
from lmlab.measure.clock import collector_paused
from lmlab.measure.precision import tf32_allowed
from lmlab.study.points import Point


def measure(point: Point, device: torch.device) -> Outcome:
    """Race the variants over one shape."""
    settings = point.settings
    shape = shape_of({**settings, **point.parameters})
    if device.type != "cuda":
        raise Unsupported("a shape for GPUs: a CPU would take minutes for each of its passes")
    arms = Arms(settings["variants"], device)
    with tf32_allowed(shape.tf32), compiler(graphs_kept=True), collector_paused():
        problem = Problem(shape, device, settings["seed"])
        problem.grad_o = gradient_of_sum(problem)
        right = reference(*problem.inputs, problem.grad_o, is_causal=shape.is_causal)
        attends: dict[str, Attend] = {}
        for name in settings["variants"]:
            with arms.attempt(name):
                refuse_unsupported(name, device, shape.dtype, shape.head_dim)
                attends[name] = compiled(name, is_causal=shape.is_causal)
                try_out(name, attends[name], problem, right, arms, device)
        del right
        passes: Passes = {**problem.passes(), "both": partial(forward_backward, problem)}
        measurements = race(arms, attends, passes, device, patience_of(settings))
    return arms.outcome(measurements, {"flops": shape.flops()})


def gradient_of_sum(problem: Problem) -> torch.Tensor:
    """What autograd hands to attention when its output was summed."""
    return torch.ones((), device=problem.q.device, dtype=problem.q.dtype).expand_as(problem.q)


def compiled(name: str, *, is_causal: bool) -> Attend:
    """A variant through torch.compile, one whole graph for this shape alone."""
    function: Any = registry.load(name)
    if name not in COMPILES:
        function = torch.compile(function, fullgraph=True, dynamic=False)
    return partial(function, is_causal=is_causal)


def forward_backward(problem: Problem, attend: Attend) -> Callable[[], object]:
    """What the leaderboard times."""

    def call() -> None:
        for tensor in problem.inputs:
            tensor.grad = None
        attend(*problem.inputs).sum().backward()

    return call
