"""Whether the variants gave the right numbers, and which of them broke, where and why.

An arm is held against a reference before it is timed, and one that is wrong gets no time. Such a
failure is of a kind: the same arm, wrong in the same way at several shapes. So it is told once for
each arm, with its shapes and the largest error, and not once for each shape.
"""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from lmlab.writeup.frames import attention as frames
from lmlab.writeup.numbers import counted, listed

OFF = "off by"
RACE = "benchmark"
MOST_NAMED = 3


def correctness(data: pd.DataFrame) -> str:
    """How many arms were held against the reference, which were off, and which broke."""
    tried = _arms(data[data["errors"].notna()])
    broken = _broken(_arms(frames.of(data, status="failed")))
    if not len(tried):
        return f"No variant was held against the reference.{broken}"
    wrong = tried[tried["reason"].astype(str).str.contains(OFF)]
    held = (
        f"Before the clock started, the results of {counted(len(tried), 'arm')} were held against "
        "a reference in fp32, some rows at a time"
    )
    if not len(wrong):
        ours = _largest(frames.of(tried, arm=frames.OURS), ", that of ours ")
        every = _largest(tried, ", their relative error at most ")
        return f"{held}; all are right{every}{ours}.{broken}"
    told = [_off(part) for _, part in wrong.groupby("arm", sort=False)]
    return (
        f"{held}; {counted(len(wrong), 'arm')} {'was' if len(wrong) == 1 else 'were'} off and got "
        f"no time: {'; '.join(told)}.{broken}"
    )


def _largest(tried: pd.DataFrame, before: str) -> str:
    """The largest relative error of each precision."""
    told = []
    for precision, part in tried.groupby("precision", sort=True):
        found = [error for errors in part["errors"] for error in errors.values() if error]
        told.append(f"{max(found, default=0):.1e} in {precision}")
    return f"{before}{listed(told)}" if told else ""


def _arms(rows: pd.DataFrame) -> pd.DataFrame:
    """One row for each arm of each point; among the tiles each direction is a point."""
    direction = rows["pass"].where(rows["topic"] == "tiles", "")
    keys = rows[[*frames.PLACE, "arm"]].assign(direction=direction)
    return rows[~keys.duplicated()]


def _off(rows: pd.DataFrame) -> str:
    return f"{frames.label(rows['arm'].iloc[0])} {shapes(rows)}, {_by_how_much(rows)}"


def _by_how_much(rows: pd.DataFrame) -> str:
    found = [error for errors in rows["errors"] for error in errors.values()]
    if None in found:
        return "with results that are not numbers"
    allowed = dict.fromkeys(str(r).rpartition("allowed is ")[2] for r in rows["reason"])
    return f"by up to {max(found):.1e} where {listed(allowed, 'or')} is allowed"


def _broken(failed: pd.DataFrame) -> str:
    """Arms that failed in another way than by their numbers."""
    failed = failed[~failed["reason"].astype(str).str.contains(OFF)]
    if not len(failed):
        return ""
    told = [
        f"{frames.label(str(arm))} {shapes(part)} ({part['reason'].iloc[0]})"
        for arm, part in failed.groupby("arm", sort=False)
    ]
    return f" {counted(len(failed), 'arm')} broke: {'; '.join(told)}."


def shapes(rows: pd.DataFrame) -> str:
    """`in fp32 at head dim 16 and 32, sequence 16,384; in small at context 128`."""
    inside_a_model = rows["sequence"].isna()
    told = [
        f"in {precision} at {'; '.join(head_dims(part))}" + (f" ({topic})" if topic != RACE else "")
        for (topic, precision), part in rows[~inside_a_model].groupby(
            ["topic", "precision"], sort=False
        )
    ]
    models = [_model(row) for _, row in rows[inside_a_model].iterrows()]
    if models:
        told.append(f"in {listed(few(list(dict.fromkeys(models))))}")
    return "; ".join(told)


def _model(row: pd.Series) -> str:
    """Where attention ran inside a model there is no shape, but a size and a context."""
    return f"{row['size']} at context {row['context']:,}"


def head_dims(rows: pd.DataFrame) -> list[str]:
    """`head dim 16 and 32, sequence 128`: those that share their sequences are told together."""
    groups: dict[str, list[str]] = {}
    for head_dim, part in rows.groupby("head_dim", sort=False):
        sequences = listed(few(list(dict.fromkeys(f"{value:,}" for value in part["sequence"]))))
        groups.setdefault(sequences, []).append(str(head_dim))
    return [f"head dim {listed(names)}, sequence {found}" for found, names in groups.items()]


def few(items: Sequence[str], most: int = MOST_NAMED) -> list[str]:
    """The first few, and how many more."""
    left = len(items) - most
    return [*items[:most], f"{left} more"] if left > 0 else list(items)
