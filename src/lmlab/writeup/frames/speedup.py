"""One precision against another, place by place and phase by phase.

The two arms are different points, measured in different processes, so the ratio is one across
points and must exceed what the same work differs by between processes; where only one arm ran
there is no ratio and the row is absent.
"""

from __future__ import annotations

import pandas as pd

from lmlab.writeup.comparison import with_verdicts
from lmlab.writeup.frames.end_to_end import PLACE, grid, of, order, pairs
from lmlab.writeup.frames.repeats import margins, tolerances

BASE = "fp32"

# What is compared, as (mode, phase) with the name that tables and figures give it.
PHASES = {
    "forward, no gradient": ("forward", "forward"),
    "forward": ("train_step", "forward"),
    "backward": ("train_step", "backward"),
    "optimizer": ("train_step", "optimizer"),
    "whole step": ("train_step", "total"),
}
CONTROL = "optimizer"
"""Autocast ends before the update of fp32 parameters: the same work whatever the precision."""


def compared_precisions(data: pd.DataFrame) -> list[str]:
    """The study's other precisions, if it has the base at all."""
    precisions = order(grid(data), "precision")
    return [name for name in precisions if name != BASE] if BASE in precisions else []


def speedups(data: pd.DataFrame, precision: str) -> pd.DataFrame:
    """Time in the base over time in the precision, with a verdict, in the study's order."""
    allowed = tolerances(data)
    arms = []
    for name, (mode, phase) in PHASES.items():
        rows = of(grid(data), mode=mode, phase=phase)
        both = pairs(of(rows, precision=BASE), of(rows, precision=precision), PLACE)
        arms.append(with_verdicts(both, margins(both, allowed)).assign(what=name))
    return pd.concat(arms, ignore_index=True)
