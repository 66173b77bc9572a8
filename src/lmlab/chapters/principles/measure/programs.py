"""Programs that are checked first and then timed against each other by the kernel clock.

Records of every topic, with the labels variant, series (which line of the figure it belongs to), x
(its place on the line) and pair (`with` and `without` the principle, for the two programs whose
ratio is quoted): `time`, and what is known of `bytes`, `flops`, `launches`, `error` (relative, to a
reference) and `peak_memory`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity

from lmlab.chapters.attention.measure.rounds import sample_in_turns, sampling_budget
from lmlab.chapters.attention.measure.variants import Variants, WrongNumbers
from lmlab.jobs.outcome import Outcome, Unsupported
from lmlab.measure.gpu_busy import is_gpu_work, profiled_events
from lmlab.measure.records import Record

INTERPRETED = "our kernels are written in Triton, which a CPU only interprets"


@dataclass(frozen=True, kw_only=True)
class Program:
    """One variant of a comparison."""

    call: Callable[[], Any]
    series: str
    x: float
    pair: str = ""
    check: Callable[[], float] | None = None
    """Its relative error."""
    within: float = 0.0
    numbers: Mapping[str, tuple[float | int | None, str]] = field(default_factory=dict)
    """Further quantities with their units."""
    unsupported: str = ""
    """Why it does not run here."""


def compare(
    programs: Mapping[str, Program],
    settings: Mapping[str, Any],
    device: torch.device,
    *shared: Record,
) -> Outcome:
    """Check every program, then time those that are right in turns."""
    labels: dict[str, dict[str, Any]] = {
        name: {"series": each.series, "x": each.x, **({"pair": each.pair} if each.pair else {})}
        for name, each in programs.items()
    }
    variants = Variants(labels, device)
    for name, each in programs.items():
        with variants.attempt(name):
            if each.unsupported:
                raise Unsupported(each.unsupported)
            _try(variants, name, each, device)
    calls = {name: lambda each=programs[name]: each.call for name in variants.running}
    sample_in_turns(variants, calls, device, sampling_budget(settings))
    return variants.outcome(*shared)


def _try(variants: Variants, name: str, program: Program, device: torch.device) -> None:
    if program.check is not None:
        error = program.check()
        variants.note(name, "error", error, "")
        if not error <= program.within:
            raise WrongNumbers(f"relative error {error:.1e}; allowed: {program.within:.0e}")
    program.call()
    if device.type == "cuda":
        events = profiled_events(program.call, device, [ProfilerActivity.CUDA])
        launches = sum(is_gpu_work(event, device) for event in events)
        variants.note(name, "launches", launches, "")
    for quantity, (number, unit) in program.numbers.items():
        variants.note(name, quantity, number, unit)


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Norm of the difference over the norm, in float64."""
    exact = expected.double()
    return ((found.double() - exact).norm() / exact.norm()).item()


def random(*shape: int, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    """Random numbers; zeros would use less power and run faster."""
    return torch.randn(shape, device=device, dtype=dtype)
