"""What is measured when warm-up is dropped, and when a fresh process reaches its pace.

Every cold start is held against the pace at which its own process settles: held against another
process it would show that process's pace too, which differs where the host is the limit.
"""

from __future__ import annotations

import pandas as pd

from lmlab.writeup.frames import end_to_end as frames
from lmlab.writeup.frames.cold_start import TOLERANCE, traces
from lmlab.writeup.numbers import counted, listed, percent, span
from lmlab.writeup.places import named


def warmup_effect(data: pd.DataFrame) -> str:
    """What the steps that warm-up would have hidden do to a mean, size by size."""
    rows = traces(data)
    counts = sorted(set(rows["warmup"]))
    if len(counts) < 2:
        return (
            "What dropping warm-up does is not known: fewer than two warm-up counts were measured."
        )
    few, many = counts[0], counts[-1]
    both = frames.pairs(frames.of(rows, warmup=few), frames.of(rows, warmup=many), ["size"])
    if not len(both):
        return (
            "What dropping warm-up does is not known: no size has both ends of the warm-up range."
        )
    first = f" The first measured step alone takes {_first(frames.of(rows, warmup=few))} times it."
    return f"{_lifted(both, few, many)}{first}{_deviations(both, few, many)}"


def enough_warmup(data: pd.DataFrame) -> str:
    """The smallest warm-up count from which on no mean lies above the settled pace."""
    rows = traces(data)
    counts = sorted(set(rows["warmup"]))
    if len(counts) < 2:
        return (
            "How much warm-up is enough is not known: fewer than two warm-up counts were measured."
        )
    enough: dict[int | None, list[str]] = {}
    sizes = frames.order(rows, "size")
    for size in sizes:
        enough.setdefault(_enough(frames.of(rows, size=size)), []).append(str(size))
    told = [
        f"{counted(count, 'warm-up') if count else 'no warm-up'} for {named(which, sizes)}"
        for count, which in sorted((c, w) for c, w in enough.items() if c is not None)
    ]
    near = f"the mean stays at most {percent(TOLERANCE, 2)} above that pace"
    sentences = [f"It takes {listed(told)} until {near}."] if told else []
    if None in enough:
        most = "1 warm-up is" if counts[-1] == 1 else f"{counts[-1]} warm-ups are"
        sentences.append(f"For {named(enough[None], sizes)} {most} not enough.")
    return " ".join(sentences)


def settling(data: pd.DataFrame) -> str:
    """From which step on a fresh process keeps its pace; of several processes the last counts."""
    rows = traces(data)
    if not len(rows):
        return "When a fresh process settles is not known: no cold start was measured."
    steps: dict[int | None, list[str]] = {}
    for size in frames.order(rows, "size"):
        found = list(frames.of(rows, size=size)["settles_at"])
        step = None if any(value is None for value in found) else max(found)
        steps.setdefault(step, []).append(str(size))
    every = frames.order(rows, "size")
    settled = [
        f"by step {step} for {named(sizes, every)}"
        for step, sizes in sorted((step, n) for step, n in steps.items() if step is not None)
    ]
    told = [f"A fresh process settles {listed(settled)}."] if settled else []
    return " ".join([*told, *(_unsettled(frames.of(rows, size=s)) for s in steps.get(None, []))])


def _unsettled(rows: pd.DataFrame) -> str:
    never = sum(step is None for step in rows["settles_at"])
    do = "does" if never == 1 else "do"
    return (
        f"Of {rows['size'].iloc[0]}, {never} of {counted(len(rows), 'process', 'processes')} {do} "
        "not settle within the steps taken."
    )


def _over_pace(rows: pd.DataFrame, end: str = "") -> pd.Series:
    return rows[f"mean_ms{end}"] / rows[f"settled_ms{end}"]


def _lifted(both: pd.DataFrame, few: int, many: int) -> str:
    """The two ends of the warm-up range, each against the pace of its own process."""
    before, later = _over_pace(both, "_a"), _over_pace(both, "_b")
    sizes = list(both["size"])
    lifted = both[before > 1 + TOLERANCE]
    rest = [size for size in sizes if size not in set(lifted["size"])]
    above = f"at most {percent(TOLERANCE, 2)} above"
    start = f"{_after(few).capitalize()} the mean step is"
    pace = "the pace at which its own process settles"
    text = f"{start} {above} {pace} for {named(rest, sizes)}"
    if len(lifted):
        others = f", and {above} it for {listed(map(str, rest))}" if rest else ""
        height = span(before[lifted.index], 2)
        text = f"{start} {height} times {pace} for {named(lifted['size'], sizes)}{others}"
    unexplained = later.max() > max(before.max(), 1 + TOLERANCE)
    doubt = ", which warm-up does not explain" if unexplained else ""
    return f"{text}; {_after(many)} it is {span(later, 2)} times that pace{doubt}."


def _first(rows: pd.DataFrame) -> str:
    first = [row["samples_ms"][0] / row["settled_ms"] for _, row in rows.iterrows()]
    return span(first, 2)


def _deviations(both: pd.DataFrame, few: int, many: int) -> str:
    known = both[both["sd_ms_a"].notna() & both["sd_ms_b"].gt(0)]
    if not len(known):
        return ""
    ratios = known["sd_ms_a"] / known["sd_ms_b"]
    return f" The standard deviation {_after(few)} is {span(ratios, 2)} times that {_after(many)}."


def _enough(rows: pd.DataFrame) -> int | None:
    """The count from which on every process of a size has a mean near its own pace."""
    lifted = set(rows["warmup"][_over_pace(rows) > 1 + TOLERANCE])
    later = [count for count in rows["warmup"] if count > max(lifted, default=-1)]
    return min(later, default=None)


def _after(count: int) -> str:
    return f"after {counted(count, 'warm-up')}" if count else "without warm-up"
