"""Numbers of the memory chapter that must fit each other."""

from __future__ import annotations

import math
from itertools import pairwise

import pandas as pd

from lmlab.writeup.collect import Collected
from lmlab.writeup.frames import memory as frames
from lmlab.writeup.frames.memory import CATEGORIES, MODES
from lmlab.writeup.numbers import binary_bytes, percent
from lmlab.writeup.places import place

REPLAY_WITHIN = 0.02
# The allocator counts what was asked for too; of that the replay has every event.
REQUESTED_WITHIN = 0.005
RECORDING_ADDS_AT_MOST = 0.02


def checks(collected: Collected) -> list[str]:
    """A warning for everything that contradicts something else."""
    data = frames.measured(frames.frame(collected))
    return [
        *replay_meets_the_counter(data),
        *replay_meets_what_was_asked_for(data),
        *categories_add_up(data),
        *recording_changes_nothing(data),
        *whole_histories(data),
        *modes_in_order(data),
        *checkpointing_saves(frames.arms(collected)),
    ]


def replay_meets_the_counter(data: pd.DataFrame) -> list[str]:
    """The replayed peak is max_memory_allocated within 2 %."""
    rows = data[data["allocated_bytes"].notna()]
    return [
        f"The replayed peak of {_what(row)} is {binary_bytes(row['replayed_bytes'])}, "
        f"max_memory_allocated {binary_bytes(row['allocated_bytes'])}: more than "
        f"{percent(REPLAY_WITHIN, 1)} apart."
        for _, row in rows.iterrows()
        if _apart(row["replayed_bytes"], row["allocated_bytes"]) > REPLAY_WITHIN
    ]


def replay_meets_what_was_asked_for(data: pd.DataFrame) -> list[str]:
    """Without rounding the two must agree much better."""
    rows = data[data["requested_bytes"].notna()]
    return [
        f"Of {_what(row)} the replay finds {binary_bytes(row['replayed_requested_bytes'])} asked "
        f"for, the allocator {binary_bytes(row['requested_bytes'])}: events are missing."
        for _, row in rows.iterrows()
        if _apart(row["replayed_requested_bytes"], row["requested_bytes"]) > REQUESTED_WITHIN
    ]


def categories_add_up(data: pd.DataFrame) -> list[str]:
    """The parts of a peak are all of it."""
    return [
        f"The parts of the peak of {_what(row)} add up to {binary_bytes(parts)} of "
        f"{binary_bytes(row['replayed_bytes'])}."
        for _, row in data.iterrows()
        if (parts := sum(row[f"live_{name}"] for name in CATEGORIES)) != row["replayed_bytes"]
    ]


def recording_changes_nothing(data: pd.DataFrame) -> list[str]:
    """A forward pass peaks as high unrecorded; a first train step has no optimizer state yet."""
    rows = data[data["unrecorded_bytes"].notna() & (data["mode"] != "train_step")]
    return [
        f"Recorded, {_what(row)} peaks at {binary_bytes(row['allocated_bytes'])}, unrecorded at "
        f"{binary_bytes(row['unrecorded_bytes'])}: recording changes what it records."
        for _, row in rows.iterrows()
        if _apart(row["allocated_bytes"], row["unrecorded_bytes"]) > RECORDING_ADDS_AT_MOST
    ]


def whole_histories(data: pd.DataFrame) -> list[str]:
    """No history outgrew its buffer."""
    return [
        f"The history of {_what(row)} outgrew its buffer: its oldest events are missing."
        for _, row in data[data["history_was_cut"].astype(bool)].iterrows()
    ]


def modes_in_order(data: pd.DataFrame) -> list[str]:
    """Keeping the graph takes more than forgetting it, and training more than either."""
    warnings = []
    for _, point in data.groupby(frames.PLACE, sort=False):
        peaks = point.set_index("mode")["peak_bytes"]
        names = [mode for mode in MODES if mode in peaks]
        for less, more in pairwise(names):
            if peaks[less] > peaks[more]:
                row = point.iloc[0]
                warnings.append(
                    f"For {place(row)}, {row['precision']}, {MODES[less]} peaks higher than "
                    f"{MODES[more]}: {binary_bytes(peaks[less])} and {binary_bytes(peaks[more])}."
                )
    return warnings


def checkpointing_saves(arms: pd.DataFrame) -> list[str]:
    """No strategy peaks higher than keeping everything."""
    plain = frames.measured(frames.of(arms, kind="none"))
    if not len(plain):
        return []
    limit = plain.iloc[0]["peak_bytes"]
    return [
        f"Checkpointing with {row['name']} peaks at {binary_bytes(row['peak_bytes'])}, above the "
        f"{binary_bytes(limit)} of keeping everything."
        for _, row in frames.measured(arms).iterrows()
        if row["peak_bytes"] > (1 + REPLAY_WITHIN) * limit
    ]


def _what(row: pd.Series) -> str:
    return f"{MODES[row['mode']]}, {place(row)}, {row['precision']}"


def _apart(one: float, other: float) -> float:
    return abs(one / other - 1) if other and not math.isnan(other) else 0.0
