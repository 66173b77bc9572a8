"""How long a step takes: its range, its growth and its parts."""

from __future__ import annotations

import pandas as pd

from lmlab.writeup.comparison import timed, verdict
from lmlab.writeup.frames import end_to_end as frames
from lmlab.writeup.frames.repeats import Limit, Tolerance, limit_of, tolerances
from lmlab.writeup.numbers import counted, every, listed, significant, times
from lmlab.writeup.places import extreme, place

PROPORTIONAL_WITHIN = 0.10


def phase_range(data: pd.DataFrame, precision: str, phase: str) -> str:
    """From the fastest to the slowest point of one phase."""
    rows = frames.of(frames.grid(data), precision=precision, mode="train_step", phase=phase)
    rows = frames.measured(rows)
    if not len(rows):
        return f"{phase.capitalize()} in {precision} was not measured."
    low = extreme(rows, "median_ms", largest=False)
    start = f"{phase.capitalize()} in {precision} takes"
    if len(rows) == 1:
        return (
            f"{start} {significant(low['median_ms'])} ms ({place(low)}), the only point measured."
        )
    high = extreme(rows, "median_ms", largest=True)
    return (
        f"{start} from {significant(low['median_ms'])} ms ({place(low)}) to "
        f"{significant(high['median_ms'])} ms ({place(high)}), "
        f"{times(high['median_ms'] / low['median_ms'], 2)} as long."
    )


def growth(data: pd.DataFrame, precision: str) -> str:
    """Whether a step's time follows the number of its tokens, for the first and the last size."""
    rows = frames.of(frames.grid(data), precision=precision, mode="train_step", phase="total")
    rows = frames.measured(rows)
    sizes = [
        s for s in frames.order(rows, "size") if rows["context"][rows["size"] == s].nunique() > 1
    ]
    if not sizes:
        return (
            f"How a step grows with context in {precision} is not known: no size has two contexts."
        )
    chosen = list(dict.fromkeys([sizes[0], sizes[-1]]))
    allowed = tolerances(data)
    told = [_growth_of(frames.of(rows, size=size), allowed) for size in chosen]
    return f"In {precision} {listed(told)}."


def _growth_of(rows: pd.DataFrame, allowed: dict[Limit, Tolerance]) -> str:
    rows = rows[rows["batch"] == rows["batch"].iloc[0]].sort_values("context")
    first, last = rows.iloc[0], rows.iloc[-1]
    tokens = last["context"] / first["context"]
    time = last["median_ms"] / first["median_ms"]
    noise = max(allowed[limit_of(end["busy_share"])].margin for end in (first, last))
    margin = max(PROPORTIONAL_WITHIN, noise)
    relation = "about in proportion" if noise < margin else "in proportion within noise"
    if time > tokens * (1 + margin):
        relation = "more than in proportion"
    elif time * (1 + margin) < tokens:
        relation = "less than in proportion"
    return (
        f"a step of {first['size']} takes {times(time)} as long at context {last['context']} as at "
        f"{first['context']}, with {tokens:g} times the tokens ({relation})"
    )


def backward_ratio(data: pd.DataFrame) -> str:
    """Which of the two passes takes longer, beyond noise."""
    ratios = frames.ratio_of_backward(data)
    if not len(ratios):
        return "Forward and backward cannot be compared: no training step was measured."
    verdicts = [
        verdict(timed(row, "_b"), timed(row, "_a"), margin=0.0) for _, row in ratios.iterrows()
    ]
    longer, shorter = verdicts.count("slower"), verdicts.count("faster")
    alike = ratios[[each == "same" for each in verdicts]]
    total = len(verdicts)
    steps, all_steps = counted(total, "training step"), every(total, "training step")
    low, high = (extreme(ratios, "ratio", largest=largest) for largest in (False, True))
    span = (
        f"backward takes {significant(low['ratio'])} ({place(low)}, {low['precision']}) to "
        f"{significant(high['ratio'])} ({place(high)}, {high['precision']}) times the time of "
        "forward"
    )
    if longer == total:
        return f"Backward takes longer than forward in {all_steps}: {span}."
    if shorter == total:
        return f"Backward takes less time than forward in {all_steps}: {span}."
    parts = {
        f"longer than forward in {longer} of {steps}": True,
        f"less time in {shorter}": shorter,
        f"the same within noise in {len(alike)}{_named_if_one(alike)}": len(alike),
    }
    return f"Backward takes {listed(text for text, told in parts.items() if told)}: {span}."


def _named_if_one(rows: pd.DataFrame) -> str:
    """Which one it is: other sentences of the chapter speak of other single steps."""
    if len(rows) != 1:
        return ""
    only = rows.iloc[0]
    return f" ({place(only)}, {only['precision']})"
