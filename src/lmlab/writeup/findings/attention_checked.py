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
    arms = data.drop_duplicates([*frames.PLACE, "arm"])
    tried = arms[arms["errors"].notna()]
    if not len(tried):
        return f"No variant was held against the reference.{_broken(arms)}"
    wrong = tried[tried["reason"].astype(str).str.contains(OFF)]
    held = f"{counted(len(tried), 'arm')} were held against a reference in fp32 before they were"
    if not len(wrong):
        return f"{held} timed, output and gradients; all are right.{_broken(arms)}"
    told = [_off(part) for _, part in wrong.groupby("arm", sort=False)]
    return (
        f"{held} timed, output and gradients; {len(wrong)} of them "
        f"{'was' if len(wrong) == 1 else 'were'} off and got no time: {'; '.join(told)}."
        f"{_broken(arms)}"
    )


def _off(rows: pd.DataFrame) -> str:
    worst = max(max(errors.values()) for errors in rows["errors"])
    allowed = list(dict.fromkeys(str(r).rpartition("allowed is ")[2] for r in rows["reason"]))
    return (
        f"{frames.label(rows['arm'].iloc[0])} {shapes(rows)}, by up to {worst:.1e} where "
        f"{listed(allowed, 'or')} is allowed"
    )


def _broken(arms: pd.DataFrame) -> str:
    """Arms that failed in another way than by their numbers."""
    failed = frames.of(arms, status="failed")
    failed = failed[~failed["reason"].astype(str).str.contains(OFF)]
    if not len(failed):
        return ""
    told = [
        f"{frames.label(str(arm))} {shapes(part)} ({part['reason'].iloc[0]})"
        for arm, part in failed.groupby("arm", sort=False)
    ]
    return f" {counted(len(failed), 'arm')} broke: {'; '.join(told)}."


def shapes(rows: pd.DataFrame) -> str:
    """`in fp32 at head dim 16 and 32, sequence 16,384`, or sizes where there are no shapes."""
    if rows["sequence"].isna().all():
        places = [f"{row['size']} at context {row['context']}" for _, row in rows.iterrows()]
        return f"in {listed(few(places))}"
    told = [
        f"in {precision} at {'; '.join(_head_dims(part))}"
        + (f" ({topic})" if topic != RACE else "")
        for (topic, precision), part in rows.groupby(["topic", "precision"], sort=False)
    ]
    return "; ".join(told)


def _head_dims(rows: pd.DataFrame) -> list[str]:
    """Head dimensions that share their sequences are told together."""
    groups: dict[str, list[str]] = {}
    for head_dim, part in rows.groupby("head_dim", sort=False):
        sequences = listed(few([f"{value:,}" for value in part["sequence"]]))
        groups.setdefault(sequences, []).append(str(head_dim))
    return [f"head dim {listed(names)}, sequence {found}" for found, names in groups.items()]


def few(items: Sequence[str], most: int = MOST_NAMED) -> list[str]:
    """The first few, and how many more."""
    left = len(items) - most
    return [*items[:most], f"{left} more"] if left > 0 else list(items)
