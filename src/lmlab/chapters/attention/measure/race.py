"""What a race between variants consists of: each is tried out and checked, then all take turns.

Correctness before speed: an arm whose output or gradients are off is stopped before the clock
starts. The first call of an arm that compiles contains the compilation and is noted apart.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lmlab.chapters.attention.measure.compiling import first_call_s
from lmlab.chapters.attention.measure.problem import Attend, Problem
from lmlab.chapters.attention.measure.reference import check, errors
from lmlab.chapters.attention.measure.variants import Arms, finite
from lmlab.measure.race import Call, Patience, measure_in_rounds
from lmlab.measure.statistics import Measurement

Passes = Mapping[str, Callable[[Attend], Call]]


def patience_of(settings: Mapping[str, Any]) -> Patience:
    """How long a point lets each arm be sampled."""
    samples = settings["samples"]
    return Patience(
        min_samples=min(10, samples), max_samples=samples, time_cap_s=settings["variant_cap_s"]
    )


def try_out(
    name: str,
    attend: Attend,
    problem: Problem,
    right: tuple[Tensor, ...],
    arms: Arms,
    device: torch.device,
) -> None:
    """Run an arm forward and backward once and check its numbers; raises if they are off."""
    found: list[Tensor] = []

    def first() -> None:
        output = attend(*problem.inputs)
        found.extend((output, *problem.gradients(output)))

    arms.note(name, first_call_s=first_call_s(first, device))
    judge(name, errors(found, right), arms, problem.shape.dtype)


def judge(name: str, off: Mapping[str, float], arms: Arms, dtype: torch.dtype) -> None:
    """Note how far an arm's numbers are off; raises if that is more than the type explains."""
    arms.note(name, errors={tensor: finite(error) for tensor, error in off.items()})
    check(off, dtype)


def race(
    arms: Arms,
    attends: Mapping[str, Attend],
    passes: Passes,
    device: torch.device,
    patience: Patience,
) -> dict[str, Measurement]:
    """Pass by pass, the arms that are still running; `arm.pass` to its samples."""
    measurements: dict[str, Measurement] = {}
    for name, prepare in passes.items():
        calls = {arm: partial(prepare, attends[arm]) for arm in arms.running}
        times, broken = measure_in_rounds(calls, device=device, patience=patience)
        measurements |= {f"{arm}.{name}": time for arm, time in times.items()}
        for arm, error in broken.items():
            arms.stop(arm, error)
    return measurements
