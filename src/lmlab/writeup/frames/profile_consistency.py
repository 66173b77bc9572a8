"""Numbers of a profile that must fit each other, side by side: for the checks and for the page."""

from __future__ import annotations

import pandas as pd

from lmlab.writeup.collect import Collected
from lmlab.writeup.frames import profile as frames

# Kernels' durations are exact; what is left is rounding.
ADDS_UP_WITHIN = 0.001
# Twice the arithmetic, a little more or less for what is not a matmul.
BACKWARD_AT_LEAST, BACKWARD_AT_MOST = 1.5, 3.0


def added_up(collected: Collected) -> pd.DataFrame:
    """Every recorded run with `added_ms`, what the kernels of its phases add up to."""
    modes, phases = frames.modes(collected), frames.phases(collected)
    if modes.empty:
        return modes.assign(added_ms=[], adds_up=[])
    keys = [*frames.PLACE, "mode"]
    sums = phases.groupby(keys, sort=False)["total_ms"].sum().rename("added_ms").reset_index()
    both = modes.merge(sums, on=keys, how="left").fillna({"added_ms": 0.0})
    return both.assign(adds_up=[same(*pair) for pair in both[["added_ms", "total_ms"]].to_numpy()])


def same(one: float, other: float) -> bool:
    """Whether two sums of the same kernels agree."""
    return abs(one - other) <= ADDS_UP_WITHIN * max(one, other)


def backward_ratios(collected: Collected) -> pd.DataFrame:
    """Every point with `ratio`, the device time of backward over that of forward."""
    phases = frames.of(frames.phases(collected), mode="forward_backward")
    both = frames.of(phases, phase="forward").merge(
        frames.of(phases, phase="backward"), on=frames.PLACE, suffixes=("_a", "_b")
    )
    both = both[both["total_ms_a"] > 0]
    return both.assign(ratio=both["total_ms_b"] / both["total_ms_a"])


def tables_compared(collected: Collected) -> pd.DataFrame:
    """Every point with `differ`: whether backward has added something to forward's kernels."""
    rows = []
    for key, here in frames.kernels(collected).groupby(frames.PLACE, sort=False):
        forward, both = (
            frames.of(here, mode=mode)[["name", "instances"]].reset_index(drop=True)
            for mode in ("forward", "forward_backward")
        )
        place = dict(zip(frames.PLACE, key, strict=True))
        rows.append({**place, "differ": not forward.equals(both)})
    return pd.DataFrame(rows, columns=[*frames.PLACE, "differ"])
