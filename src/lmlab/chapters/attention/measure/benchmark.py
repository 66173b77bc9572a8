"""Every variant on one shape: forward, backward and both, by the kernel clock, in one process.

First each arm runs once, and its output and gradients are held against a reference: an arm that is
wrong gets no time. Then, pass by pass, the arms that are right take turns until their times have
settled (`lmlab.measure.race`).

`tiled` walks its tiles in Python, thousands of launches a pass on a long sequence. One pass over a
short sequence tells how long a long one takes, the square of their ratio as long, and an arm that
would outlast its cap is not begun: its status is `capped`, with the time that was to be expected.

`data`: `flops` of each pass; `arms` with `errors` and `first_call_s`, compilation included.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch

from lmlab.attention import registry
from lmlab.chapters.attention.measure.compiling import compiler_for, first_call_s
from lmlab.chapters.attention.measure.problem import Attend, Problem, Shape, shape_of
from lmlab.chapters.attention.measure.race import patience_of, race, try_out
from lmlab.chapters.attention.measure.reference import reference
from lmlab.chapters.attention.measure.variants import Arms, Capped, refuse_unsupported
from lmlab.jobs.outcome import Outcome, Unsupported
from lmlab.measure.clock import collector_paused
from lmlab.measure.precision import tf32_allowed, why_unsupported
from lmlab.study.points import Point

WALKS_IN_PYTHON = frozenset({"tiled"})
PROBE = 512
"""Sequence over which such an arm is tried."""


def measure(point: Point, device: torch.device) -> Outcome:
    """Measure one shape."""
    settings = point.settings
    shape = shape_of({**settings, **point.parameters})
    if reason := why_unsupported(shape.precision, device):
        raise Unsupported(reason)
    arms = Arms(settings["variants"], device)
    # One collection for all: each of the many short measurements below would pay for its own.
    with (
        tf32_allowed(shape.tf32),
        compiler_for(settings["variants"], graphs_kept=True),
        collector_paused(),
    ):
        problem = Problem(shape, device, settings["seed"])
        right = reference(*problem.inputs, problem.grad_o, is_causal=shape.is_causal)
        attends: dict[str, Attend] = {}
        for name in settings["variants"]:
            with arms.attempt(name):
                refuse_unsupported(name, device, shape.dtype, shape.head_dim)
                attends[name] = partial(registry.load(name), is_causal=shape.is_causal)
                refuse_too_slow(name, attends[name], shape, device, settings["variant_cap_s"])
                try_out(name, attends[name], problem, right, arms, device)
        del right
        measurements = race(arms, attends, problem.passes(), device, patience_of(settings))
    return arms.outcome(measurements, {"flops": shape.flops(), "threads": torch.get_num_threads()})


def refuse_too_slow(
    name: str, attend: Attend, shape: Shape, device: torch.device, cap_s: float
) -> None:
    """Raise `Capped` for an arm whose single forward and backward would outlast its cap."""
    if name not in WALKS_IN_PYTHON or shape.sequence <= PROBE:
        return
    short = replace(shape, sequence=PROBE)
    both = Problem(short, device, seed=0).passes()["both"](attend)
    first_call_s(both, device)
    expected_s = first_call_s(both, device) * (shape.sequence / PROBE) ** 2
    if expected_s > cap_s:
        raise Capped(
            f"forward and backward would take about {expected_s:.2g} s by its time over {PROBE}"
            f" queries; the cap is {cap_s:g} s"
        )
