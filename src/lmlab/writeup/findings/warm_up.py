"""What is measured when warm-up is dropped, and when a fresh process reaches its pace.

Every cold start is held against the pace at which its own process settles: held against another
process it would show that process's pace too, which differs where the host is the limit. A process
that never settles, or settles and later slows down, has no one pace to be held against: it is named
and left out of what is said about warm-up.
"""

from __future__ import annotations

import pandas as pd

from lmlab.writeup.frames import end_to_end as frames
from lmlab.writeup.frames.cold_start import TOLERANCE, keeps_pace, traces
from lmlab.writeup.numbers import counted, listed, percent, significant, span
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
    steady = rows[keeps_pace(rows)]
    both = frames.pairs(frames.of(steady, warmup=few), frames.of(steady, warmup=many), ["size"])
    if not len(both):
        return (
            "What dropping warm-up does is not known: no size has processes that keep one pace at "
            "both ends of the warm-up range."
        )
    starts = [samples[0] for samples in both["samples_ms_a"]]
    first = span(pd.Series(starts) / both["settled_ms_a"].array, 2)
    alone = f" The first measured step alone takes {first} times it."
    lifted = _lifted(both, few, many, frames.order(rows, "size"))
    return f"{lifted}{alone}{_deviations(both, few, many)}"


def enough_warmup(data: pd.DataFrame) -> str:
    """The smallest warm-up count from which on no mean lies above the settled pace."""
    rows = traces(data)
    if rows["warmup"].nunique() < 2:
        return (
            "How much warm-up is enough is not known: fewer than two warm-up counts were measured."
        )
    steady = rows[keeps_pace(rows)]
    if not len(steady):
        return "How much warm-up is enough is not known: no process keeps one pace."
    every = frames.order(rows, "size")
    enough: dict[int, list[str]] = {}
    too_few: dict[int, list[str]] = {}
    for size in frames.order(steady, "size"):
        here = frames.of(steady, size=size)
        count = _enough(here)
        found = too_few if count is None else enough
        found.setdefault(here["warmup"].max() if count is None else count, []).append(str(size))
    return " ".join([*_takes(enough, every), *_too_few(too_few, every), *_left_out(rows)])


def settling(data: pd.DataFrame) -> str:
    """From which step on a fresh process keeps its pace; of several processes the last counts."""
    rows = traces(data)
    if not len(rows):
        return "When a fresh process settles is not known: no cold start was measured."
    steps: dict[int, list[str]] = {}
    settled = rows[rows["settles_at"].notna()]
    for size in frames.order(settled, "size"):
        last = max(frames.of(settled, size=size)["settles_at"])
        steps.setdefault(last, []).append(str(size))
    every = frames.order(rows, "size")
    when = listed(f"by step {step} for {named(of, every)}" for step, of in sorted(steps.items()))
    all_do = len(settled) == len(rows)
    does = "A fresh process settles" if all_do else "A fresh process that settles does so"
    told = [f"{does} {when}."] if steps else []
    each = [frames.of(rows, size=size) for size in every]
    return " ".join(
        [*told, *filter(None, map(_unsettled, each)), *filter(None, map(_slowed, each))]
    )


def _takes(enough: dict[int, list[str]], every: list[str]) -> list[str]:
    """An upper bound: between the counts measured a smaller one may do."""
    told = [
        f"{'at most ' + counted(count, 'warm-up') if count else 'no warm-up'} for "
        f"{named(sizes, every)}"
        for count, sizes in sorted(enough.items())
    ]
    near = f"the mean stays within {percent(TOLERANCE, 2)} above that pace"
    return [f"It takes {listed(told)} until {near}."] if told else []


def _too_few(counts: dict[int, list[str]], every: list[str]) -> list[str]:
    return [
        f"For {named(sizes, every)} {counted(most, 'warm-up')} {'is' if most == 1 else 'are'} "
        "not enough."
        for most, sizes in sorted(counts.items())
    ]


def _left_out(rows: pd.DataFrame) -> list[str]:
    """Processes that judge nothing: without one pace there is nothing to hold a mean against."""
    restless = rows[~keeps_pace(rows)]
    told = [
        f"{len(frames.of(restless, size=size))} of {len(frames.of(rows, size=size))} of {size}"
        for size in frames.order(restless, "size")
    ]
    left = f"Processes that do not keep one pace ({listed(told)}) say nothing about it."
    return [left] if told else []


def _unsettled(rows: pd.DataFrame) -> str:
    never = int(rows["settles_at"].isna().sum())
    do = "does" if never == 1 else "do"
    return f"{_some(rows, never)} {do} not settle within the steps taken." if never else ""


def _slowed(rows: pd.DataFrame) -> str:
    """Processes that slow down after settling, and whether the GPU's work leaves only the host."""
    slowed = rows[rows["changes_pace"]]
    if not len(slowed):
        return ""
    paces = listed(
        f"from {significant(row['early_ms'])} to {significant(row['settled_ms'])} ms"
        for _, row in slowed.iterrows()
    )
    slow = "slows" if len(slowed) == 1 else "slow"
    told = f"{_some(rows, len(slowed))} {slow} down after settling, {paces} a step"
    busy = slowed["busy_share"] * slowed["median_ms"]
    if (busy < slowed["early_ms"]).all():
        return f"{told}; the GPU is busy for {span(busy)} ms of it, so it is the host that slowed."
    return f"{told}, which warm-up does not explain."


def _some(rows: pd.DataFrame, count: int) -> str:
    every = counted(len(rows), "process", "processes")
    return f"Of {rows['size'].iloc[0]}, {count} of {every}"


def _over_pace(rows: pd.DataFrame, end: str = "") -> pd.Series:
    return rows[f"mean_ms{end}"] / rows[f"settled_ms{end}"]


def _lifted(both: pd.DataFrame, few: int, many: int, every: list[str]) -> str:
    """The two ends of the warm-up range, each against the pace of its own process."""
    before, later = _over_pace(both, "_a"), _over_pace(both, "_b")
    sizes = list(both["size"])
    lifted = both[before > 1 + TOLERANCE]
    rest = [size for size in sizes if size not in set(lifted["size"])]
    above = f"at most {percent(TOLERANCE, 2)} above"
    start = f"{_after(few).capitalize()} the mean step is"
    pace = "the pace at which its own process settles"
    text = f"{start} {above} {pace} for {named(rest, every)}"
    if len(lifted):
        others = f", and {above} it for {listed(map(str, rest))}" if rest else ""
        height = span(before[lifted.index], 2)
        text = f"{start} {height} times {pace} for {named(lifted['size'], every)}{others}"
    unexplained = later.max() > max(before.max(), 1 + TOLERANCE)
    doubt = ", which warm-up does not explain" if unexplained else ""
    return f"{text}; {_after(many)} it is {span(later, 2)} times that pace{doubt}."


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
