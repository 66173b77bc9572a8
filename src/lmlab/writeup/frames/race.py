"""The race of the variants: who is fastest at a shape, and from which sequence on an arm wins."""

from __future__ import annotations

from collections.abc import Collection

import pandas as pd

from lmlab.writeup.frames.attention import against_each, measured, order


def fastest(rows: pd.DataFrame, without: Collection[str] = ()) -> pd.DataFrame:
    """The row of the fastest arm at each shape and pass."""
    rows = measured(rows[~rows["arm"].isin(list(without))])
    if not len(rows):
        return rows
    keys = ["precision", "head_dim", "sequence", "pass"]
    return rows.loc[rows.groupby(keys, sort=False)["median_ms"].idxmin()]


def wins_from(ratios: pd.DataFrame) -> int | None:
    """The sequence from which on every ratio is a win beyond noise; None where there is none."""
    won = None
    for sequence in sorted(set(ratios["sequence"]), reverse=True):
        if not (ratios["verdict"][ratios["sequence"] == sequence] == "faster").all():
            break
        won = int(sequence)
    return won


def losses(rows: pd.DataFrame, arm: str, others: Collection[str]) -> pd.DataFrame:
    """Every shape and pass at which the arm is slower than one of the others beyond noise."""
    every = beside(rows, arm, others)
    return every[every["verdict"] == "slower"].reset_index(drop=True)


def beside(rows: pd.DataFrame, arm: str, others: Collection[str] | None = None) -> pd.DataFrame:
    """The arm against each of the others at every shape and pass that both have, named `other`."""
    names = order(rows, "arm") if others is None else others
    found = against_each(rows, arm, [name for name in names if name != arm])
    return found.assign(other=found["arm_a"])
