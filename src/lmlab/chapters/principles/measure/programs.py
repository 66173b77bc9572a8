"""Programs that are checked first and then timed against each other by the kernel clock.

Records of every topic, with the labels variant, series (its line in the figure), x (its position on
the line) and pair (`with` or `without` the principle, for the two programs whose ratio is quoted):
`time` and, where known, `bytes`, `flops`, `launches`, `error` (relative to a reference),
`peak_memory` (above what was allocated before) and `saved_bytes`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity

from lmlab.chapters.attention.measure.rounds import sample_in_turns, sampling_budget
from lmlab.chapters.attention.measure.variants import Variants, WrongNumbers
from lmlab.jobs.outcome import Unsupported
from lmlab.measure.device import peak_memory_bytes, reset_peak_memory
from lmlab.measure.intervals import is_gpu_work, profiled_events
from lmlab.study.points import Point

INTERPRETED = "our kernels are written in Triton, which a CPU only interprets"
UNITS = {"flops": "FLOP", "bytes": "B", "saved_bytes": "B"}


@dataclass(frozen=True, kw_only=True)
class Program:
    """One variant of a comparison."""

    call: Callable[[], Any]
    series: str = ""
    x: float = 0.0
    pair: str = ""
    part: str = ""
    expected: Tensor | None = None
    """What a call returns, or the first rows of it."""
    error: Callable[[Any], float] | None = None
    """Instead: the relative error of what a call returns."""
    within: float = 0.0
    numbers: Mapping[str, int] = field(default_factory=dict)
    """What is known of it."""
    has_peak: bool = False
    """Whether its peak memory is of interest."""
    unsupported: str = ""
    """Why it does not run here."""

    @property
    def labels(self) -> dict[str, Any]:
        """The labels that are set."""
        labels = {"series": self.series, "x": self.x, "pair": self.pair, "part": self.part}
        return {name: label for name, label in labels.items() if label}


def asked_of(point: Point) -> dict[str, Any]:
    """Parameters and settings of a point; seeds its random numbers."""
    torch.manual_seed(point.settings["seed"])
    return {**point.settings, **point.parameters}


def compare(
    programs: Mapping[str, Program], settings: Mapping[str, Any], device: torch.device
) -> Variants:
    """Check every program, then time those that pass, interleaved."""
    variants = Variants({name: each.labels for name, each in programs.items()}, device)
    for name, each in programs.items():
        with variants.attempt(name):
            _try(variants, name, each)
    calls = {name: lambda each=programs[name]: each.call for name in variants.running}
    sample_in_turns(variants, calls, sampling_budget(settings))
    return variants


def _try(variants: Variants, name: str, program: Program) -> None:
    device = variants.device
    if program.unsupported:
        raise Unsupported(program.unsupported)
    found = program.call()
    error_of = program.error
    if program.expected is not None:
        error_of = partial(relative_error, expected=program.expected)
    if error_of is not None:
        error = error_of(found)
        variants.note(name, "error", error, "")
        if not error <= program.within:
            raise WrongNumbers(f"relative error {error:.1e}; allowed: {program.within:.0e}")
    del found
    if device.type == "cuda":
        events = profiled_events(program.call, device, [ProfilerActivity.CUDA])
        launches = sum(is_gpu_work(event, device) for event in events)
        variants.note(name, "launches", launches, "")
    if program.has_peak and device.type == "cuda":
        before = torch.cuda.memory_allocated(device)
        reset_peak_memory(device)
        program.call()
        variants.note(name, "peak_memory", (peak_memory_bytes(device) or 0) - before, "B")
    for quantity, number in program.numbers.items():
        variants.note(name, quantity, number, UNITS[quantity])


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Norm of the difference over the norm of `expected`, in float64, over its rows only."""
    exact = expected.double()
    return ((found[: len(exact)].double() - exact).norm() / exact.norm()).item()
