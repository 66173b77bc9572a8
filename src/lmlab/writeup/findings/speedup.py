"""Where one precision pays, where it costs, where it makes no difference."""

from __future__ import annotations

import pandas as pd

from lmlab.writeup.frames import end_to_end as frames
from lmlab.writeup.frames.speedup import BASE, CONTROL, PHASES, speedups
from lmlab.writeup.numbers import every, factor
from lmlab.writeup.places import extreme, place, where


def speedup_findings(data: pd.DataFrame, precision: str) -> dict[str, str]:
    """One sentence on where it starts to pay, and one a phase."""
    ratios = speedups(data, precision)
    return {
        f"pays_{precision}": starts_to_pay(frames.of(ratios, what="whole step"), precision),
        **{
            f"speedup_{precision}_{what.replace(', ', '_').replace(' ', '_')}": (
                control if what == CONTROL else in_phase
            )(frames.of(ratios, what=what), what, precision)
            for what in PHASES
        },
    }


def starts_to_pay(ratios: pd.DataFrame, precision: str) -> str:
    """The smallest size and context, in the study's order, at which the whole step is faster."""
    if not len(ratios):
        return f"Where {precision} starts to pay is not known: no step was measured in both."
    faster = ratios[ratios["verdict"] == "faster"]
    if not len(faster):
        return f"{precision} does not pay: no training step is faster than in {BASE} beyond noise."
    first = faster.iloc[0]
    if len(faster) == len(ratios):
        return (
            f"{precision} pays everywhere: every training step is faster than in {BASE}, "
            f"{factor(first['speedup'])} already for {place(first)}."
        )
    return (
        f"{precision} starts to pay with {place(first)}, the smallest training step that is faster "
        f"than in {BASE} beyond noise ({factor(first['speedup'])}); {len(faster)} of {len(ratios)} "
        "steps are."
    )


def in_phase(ratios: pd.DataFrame, what: str, precision: str) -> str:
    """All places of one phase: faster, slower, or neither."""
    name = what.capitalize()
    if not len(ratios):
        return f"{name}: no place was measured in both precisions."
    parts = [
        _group(ratios, "faster", f"{precision} is faster", "up to", largest=True),
        _group(ratios, "slower", f"{precision} is slower", "down to", largest=False),
    ]
    same = ratios[ratios["verdict"] == "same"]
    if len(same) == len(ratios):
        return f"{name}: {precision} and {BASE} take the same time within noise at every place."
    if len(same):
        parts.append(f"within noise at {len(same)} of {len(ratios)} places")
    return f"{name}: {'; '.join(part for part in parts if part)}."


def control(ratios: pd.DataFrame, what: str, precision: str) -> str:
    """A phase that does the same work in both precisions: what the comparison itself adds."""
    name = what.capitalize()
    if not len(ratios):
        return f"{name}: no place was measured in both precisions."
    low, high = (extreme(ratios, "speedup", largest=largest) for largest in (False, True))
    span = f"{factor(low['speedup'])} ({place(low)})"
    if len(ratios) > 1:
        span += f" to {factor(high['speedup'])} ({place(high)})"
    start = (
        f"{name}: the same work in {BASE} and in {precision}, hence a control. Its ratio, {span}, "
        "is what the comparison itself adds"
    )
    beyond = ratios[ratios["verdict"] != "same"]
    if not len(beyond):
        return f"{start}, within noise at every place."
    return (
        f"{start}; it is beyond noise at {_count(beyond, ratios)} "
        f"({where(beyond, ratios)}), where the ratios of other phases are to be doubted too."
    )


def _group(ratios: pd.DataFrame, verdict: str, claim: str, reaching: str, *, largest: bool) -> str:
    rows = ratios[ratios["verdict"] == verdict]
    if not len(rows):
        return ""
    best = extreme(rows, "speedup", largest=largest)
    return (
        f"{claim} at {_count(rows, ratios)} ({where(rows, ratios)}), "
        f"{reaching} {factor(best['speedup'])} ({place(best)})"
    )


def _count(rows: pd.DataFrame, ratios: pd.DataFrame) -> str:
    if len(rows) == len(ratios):
        return every(len(rows), "place")
    return f"{len(rows)} of {len(ratios)} places"
