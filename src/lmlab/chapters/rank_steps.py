"""What the chapters that train on several ranks share: the size they run, and how steps are timed.

A variant is a `Ready`: a context within which it has its memory and is warm.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist

from lmlab.jobs.autosize import Choice, choose
from lmlab.jobs.rank_work import Candidate, RankWork, Ready, second_step_s
from lmlab.measure.clock import PhaseClock
from lmlab.measure.records import Record, without_value
from lmlab.measure.rounds import TimedStep
from lmlab.study.points import Point

Prepare = Callable[[RankWork], Callable[[], object]]
"""Builds what a trial runs; returns its step."""


def quick_size(
    point: Point, sizes: list[Candidate], device: torch.device, prepare: Prepare, *, messages: float
) -> Choice:
    """The largest size whose step is short enough; it sends `messages` times its gradients."""
    return choose(
        sizes,
        device,
        limit_s=point.settings["step_limit_s"],
        messages=messages,
        try_step=lambda candidate: second_step_s(
            prepare(RankWork(candidate.workload, device)), device
        ),
    )


def timed_step(ready: Ready) -> TimedStep:
    """A training step as one phase: synchronizing within it would prevent overlap."""

    def step(clock: PhaseClock) -> None:
        with ready() as run:
            dist.barrier()  # ranks may take different times to build a variant
            with clock.phase("step"):
                run()

    return step


def no_time(variant: str, status: str, reason: str) -> Record:
    """Why a variant is not timed."""
    return without_value("time", status, reason, variant=variant, phase="total")
