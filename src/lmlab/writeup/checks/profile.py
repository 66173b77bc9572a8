"""Numbers of the profile chapter that must fit each other."""

from __future__ import annotations

import pandas as pd

from lmlab.writeup import profile_words as words
from lmlab.writeup.collect import Collected
from lmlab.writeup.frames import profile as frames
from lmlab.writeup.frames.profile_consistency import (
    ADDS_UP_WITHIN,
    BACKWARD_AT_LEAST,
    BACKWARD_AT_MOST,
    added_up,
    backward_ratios,
    same,
    tables_compared,
)
from lmlab.writeup.numbers import percent, significant
from lmlab.writeup.places import place

# A profiled forward pass cannot work longer than the clock saw it take, but for its own noise.
BUSY_AT_MOST = 1.15


def checks(collected: Collected) -> list[str]:
    """A warning for everything that contradicts something else."""
    return [
        *kernels_add_up(added_up(collected), frames.phases(collected)),
        *tables_add_up(frames.modes(collected)),
        *backward_about_twice(collected),
        *tables_differ(collected),
        *busy_within_time(collected),
        *below_peak(collected),
    ]


def kernels_add_up(modes: pd.DataFrame, phases: pd.DataFrame) -> list[str]:
    """Every kernel stands in one phase, and a phase is busy no longer than its kernels take."""
    warnings = []
    for _, run in modes.iterrows():
        here = frames.of(phases, **{key: run[key] for key in [*frames.PLACE, "mode"]})
        name = f"{words.MODE_NAMES[run['mode']]} of {place(run)}"
        if not run["adds_up"]:
            warnings.append(
                f"The kernels of the phases of {name} add up to {significant(run['added_ms'])} ms "
                f"of {significant(run['total_ms'])} ms of GPU time."
            )
        for _, phase in here[here["busy_ms"] > here["total_ms"] * (1 + ADDS_UP_WITHIN)].iterrows():
            warnings.append(
                f"The {phase['phase']} phase of {name} is busy for "
                f"{significant(phase['busy_ms'])} ms, longer than its kernels take "
                f"({significant(phase['total_ms'])} ms)."
            )
    return warnings


def tables_add_up(modes: pd.DataFrame) -> list[str]:
    """The kernel table, its rest and the copies are all of a run."""
    return [
        f"The kernel table of {words.MODE_NAMES[run['mode']]} of {place(run)} adds up to "
        f"{significant(run['table_ms'] + run['copies_ms'])} ms of "
        f"{significant(run['total_ms'])} ms."
        for _, run in modes.iterrows()
        if not same(run["table_ms"] + run["copies_ms"], run["total_ms"])
    ]


def backward_about_twice(collected: Collected) -> list[str]:
    """GPU time of backward is 1.5 to 3 times that of forward; a CPU is not held to it."""
    if collected.device != "cuda":
        return []
    both = backward_ratios(collected)
    outside = both[~both["ratio"].between(BACKWARD_AT_LEAST, BACKWARD_AT_MOST)]
    return [
        f"GPU time of backward should be {BACKWARD_AT_LEAST:g} to {BACKWARD_AT_MOST:g} times that "
        f"of forward; for {place(row)} it is {significant(row['ratio'])} times."
        for _, row in outside.iterrows()
    ]


def tables_differ(collected: Collected) -> list[str]:
    """A forward table that equals the forward and backward one has lost the backward kernels."""
    compared = tables_compared(collected)
    return [
        f"The kernel tables of forward and of forward and backward of {place(row)} are the same: "
        "the kernels of backward are missing."
        for _, row in compared[~compared["differ"].astype(bool)].iterrows()
    ]


def busy_within_time(collected: Collected) -> list[str]:
    """The GPU cannot work longer in forward than forward takes."""
    if collected.device != "cuda":
        return []
    forward = frames.of(frames.modes(collected), mode="forward")
    both = frames.points(collected).merge(forward, on=frames.PLACE)
    return [
        f"The GPU is busy for {percent(row['busy_ms'] / row['median_ms'])} of the clock's forward "
        f"pass of {place(row)}: longer than it lasts."
        for _, row in both.iterrows()
        if row["busy_ms"] > BUSY_AT_MOST * row["median_ms"]
    ]


def below_peak(collected: Collected) -> list[str]:
    """No part of attention multiplies faster than the hardware can."""
    warnings = []
    for _, row in frames.parts(collected).iterrows():
        peak = collected.ceiling("peaks", "tflops", row["precision"])
        if peak is not None and row["tflops"] > peak:
            warnings.append(
                f"Attention's {words.PART_NAMES[row['part']]} of {place(row)} runs at "
                f"{significant(row['tflops'])} TFLOP/s, above the stated peak of "
                f"{significant(peak)}."
            )
    return warnings
