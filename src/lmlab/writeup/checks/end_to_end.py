"""Numbers of the end-to-end chapter that must fit each other."""

from __future__ import annotations

import math

import pandas as pd

from lmlab.writeup.collect import Collected
from lmlab.writeup.comparison import agree, timed
from lmlab.writeup.frames import end_to_end as frames
from lmlab.writeup.frames.repeats import GPU_LIMITED_FROM, repeats
from lmlab.writeup.numbers import percent, significant
from lmlab.writeup.places import place

# Two processes measuring the same thing: clocks, temperature and memory layout differ.
SAME_QUANTITY_WITHIN = 0.10
# Means add up exactly; what is left is the clock between the phases.
SUM_WITHIN = 0.05
SUM_WITHIN_MS = 0.05
# Twice the arithmetic, a little more or less for what is not a matmul.
BACKWARD_AT_LEAST, BACKWARD_AT_MOST = 1.5, 3.0
# The busy time is of another step than the median it is held against.
BUSY_AT_MOST = 1.15


def checks(collected: Collected) -> list[str]:
    """A warning for everything that contradicts something else."""
    data = frames.frame(collected)
    return [
        *same_work_twice(data),
        *backward_about_twice(data),
        *phases_add_up(data),
        *below_peak(collected, data),
        *busy_within_time(data),
    ]


def same_work_twice(data: pd.DataFrame) -> list[str]:
    """Two processes that do the same work take the same time, unless the host sets the pace.

    A waiting GPU is no contradiction: how far such pairs lie apart is a finding with its worst case
    named, and the tolerance of every comparison.
    """
    both = repeats(data)
    return [
        f"The same quantity twice: {row['phase']} in {row['process_a']} and in {row['process_b']} "
        f"differs by more than its noise for {place(row)}, {row['precision']}: "
        f"{significant(row['median_ms_a'])} ms and {significant(row['median_ms_b'])} ms."
        for _, row in both[both["limit"] != "host"].iterrows()
        if not agree(timed(row, "_a"), timed(row, "_b"), margin=SAME_QUANTITY_WITHIN)
    ]


def backward_about_twice(data: pd.DataFrame) -> list[str]:
    """Backward has twice the arithmetic; where the GPU is the limit the times must show it."""
    ratios = frames.ratio_of_backward(data)
    busy = ratios[ratios[["busy_share_a", "busy_share_b"]].min(axis=1) >= GPU_LIMITED_FROM]
    return [
        f"Backward should take about twice forward where the GPU is the limit; for {place(row)}, "
        f"{row['precision']}, it takes {significant(row['ratio'])} times as long."
        for _, row in busy.iterrows()
        if not BACKWARD_AT_LEAST <= row["ratio"] <= BACKWARD_AT_MOST
    ]


def phases_add_up(data: pd.DataFrame) -> list[str]:
    """The phases of a step are all of it."""
    warnings = []
    keys = [*frames.PLACE, "precision", "mode", "warmup", "start"]
    for _, point in frames.measured(data).groupby(keys, sort=False):
        total = point["mean_ms"][point["phase"] == "total"].sum()
        parts = point["mean_ms"][point["phase"] != "total"].sum()
        if abs(total - parts) > max(SUM_WITHIN * total, SUM_WITHIN_MS):
            row = point.iloc[0]
            warnings.append(
                f"The phases of {place(row)}, {row['precision']}, mode {row['mode']}, "
                f"{row['start']} start, add up to {significant(parts)} ms of "
                f"{significant(total)} ms."
            )
    return warnings


def below_peak(collected: Collected, data: pd.DataFrame) -> list[str]:
    """No step multiplies faster than the hardware can."""
    warnings = []
    steps = frames.measured(frames.grid(data))
    for _, row in steps[steps["tflops"].notna()].iterrows():
        peak = collected.ceiling("peaks", "tflops", row["precision"])
        if peak is not None and row["tflops"] > peak:
            warnings.append(
                f"The {row['phase']} rate of {place(row)}, {row['precision']}, mode {row['mode']}, "
                f"is {significant(row['tflops'])} TFLOP/s, above the stated peak of "
                f"{significant(peak)}."
            )
    return warnings


def busy_within_time(data: pd.DataFrame) -> list[str]:
    """The GPU cannot work longer than the phase lasts."""
    rows = frames.measured(frames.grid(data))
    return [
        f"The GPU is busy for {percent(row['busy_share'])} of {row['phase']} of {place(row)}, "
        f"{row['precision']}, mode {row['mode']}: longer than the phase lasts."
        for _, row in rows.iterrows()
        if not math.isnan(row["busy_share"]) and row["busy_share"] > BUSY_AT_MOST
    ]
