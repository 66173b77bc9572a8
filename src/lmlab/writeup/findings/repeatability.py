"""How well times repeat: within a process, and from one process to the next.

Both kinds of scatter are told with what causes them, as far as the data shows it: the share of a
step in which the GPU ran anything says whether the host was the limit.
"""

from __future__ import annotations

import pandas as pd

from lmlab.writeup.comparison import ACROSS_POINTS
from lmlab.writeup.frames import end_to_end as frames
from lmlab.writeup.frames.repeats import (
    FEWEST_PAIRS,
    GPU_LIMITED_FROM,
    HOST_LIMITED_BELOW,
    LIMITS,
    Limit,
    Tolerance,
    limit_of,
    repeats,
    tolerances,
)
from lmlab.writeup.numbers import counted, excess, listed, percent, significant
from lmlab.writeup.places import extreme, place

SMALL_SPREAD = 0.02
LARGE_SPREAD = 0.10
NEARLY_ALL = 0.90
DEVIATION = (
    "within a process the standard deviation of a step relative to its mean "
    "is, in the median point,"
)

WHERE: dict[Limit, str] = {
    "gpu": f"where the GPU is busy for at least {percent(GPU_LIMITED_FROM, 2)} of it",
    "partly": f"where the GPU is busy for {100 * HOST_LIMITED_BELOW:.0f} to "
    f"{percent(GPU_LIMITED_FROM, 2)} of it",
    "host": f"where the GPU is busy for under {percent(HOST_LIMITED_BELOW, 2)} and waits for the "
    "host",
    "unknown": "",
}
IN_WORDS: dict[Limit, str] = {
    "gpu": "where the GPU is the limit",
    "host": "where the GPU waits for the host",
}


def spread(data: pd.DataFrame, device: str) -> str:
    """Whether repeated steps of one process take the same time, and who is the reason if not."""
    rows = frames.of(frames.measured(frames.grid(data)), phase="total")
    rows = rows[rows["sd_ms"].notna()]
    if not len(rows):
        return "The spread is not known: no point has more than one sample."
    rows = rows.assign(
        cv=rows["sd_ms"] / rows["mean_ms"],
        limit=[limit_of(share) for share in rows["busy_share"]],
    )
    if device == "cpu":
        one = "On a CPU host and device are one, so no busy share tells where it comes from."
        return f"{_overall(rows)} {one}"
    return " ".join(filter(None, [_by_limit(rows) or _overall(rows), _noisy(rows)]))


def _overall(rows: pd.DataFrame) -> str:
    typical, largest = float(rows["cv"].median()), float(rows["cv"].max())
    deviation = f"{DEVIATION} {percent(typical, 2)}"
    if typical >= SMALL_SPREAD:
        return f"The spread is not small: {deviation} and reaches {_worst(rows)}."
    if largest >= LARGE_SPREAD:
        return f"The spread is small with exceptions: {deviation}, but reaches {_worst(rows)}."
    return f"The spread is small: {deviation} and at most {_worst(rows)}."


def _by_limit(rows: pd.DataFrame) -> str:
    """Where the spread is small and where not, if who is the limit makes the difference."""
    medians = {
        limit: float(part["cv"].median())
        for limit in IN_WORDS
        if len(part := frames.of(rows, limit=limit))
    }
    small = [limit for limit, median in medians.items() if median < SMALL_SPREAD]
    if len(medians) < 2 or len(small) != 1:
        return ""
    (large,) = set(medians) - set(small)
    told = [
        f"{percent(median, 2)} {WHERE[limit]} "
        f"({counted(int(rows['limit'].eq(limit).sum()), 'point')})"
        for limit, median in medians.items()
    ]
    return (
        f"The spread is small {IN_WORDS[small[0]]} and not {IN_WORDS[large]}: {DEVIATION} "
        f"{listed(told)}. It reaches {_worst(rows)}."
    )


def _worst(rows: pd.DataFrame) -> str:
    worst = extreme(rows, "cv", largest=True)
    where = f"{place(worst)}, {worst['precision']}, mode {worst['mode']}"
    return f"{percent(worst['cv'], 2)} ({where})"


def _noisy(rows: pd.DataFrame) -> str:
    """The host as the reason, but only where nearly all noisy points share it."""
    noisy = rows[rows["cv"] >= LARGE_SPREAD]
    if not len(noisy) or noisy["limit"].eq("unknown").any():
        return ""
    waiting = int(noisy["limit"].eq("host").sum())
    beyond = (
        f"{len(noisy)} of {counted(len(rows), 'point')} {'is' if len(noisy) == 1 else 'are'} "
        f"beyond {percent(LARGE_SPREAD, 2)}"
    )
    if len(noisy) == 1:
        whom = "the GPU waits for the host" if waiting else "the host is not the limit"
        return f"{beyond}, and there {whom}."
    if waiting == len(noisy):
        return f"{beyond}, and in all of these the GPU waits for the host."
    if waiting >= NEARLY_ALL * len(noisy):
        return f"{beyond}, and in {waiting} of these the GPU waits for the host."
    return (
        f"{beyond}, but only in {waiting} of these the GPU waits for the host: it is not the whole "
        "reason."
    )


def between_processes(data: pd.DataFrame) -> str:
    """How far two processes that do the same work lie apart, by who is the limit."""
    found, allowed = repeats(data), tolerances(data)
    known = [limit for limit in LIMITS if allowed[limit].pairs]
    if not known:
        return (
            "How far the same pass differs between processes is not known: none was measured "
            f"twice. Across points a difference must exceed {percent(ACROSS_POINTS, 1)}."
        )
    told = [f"{excess(1 + allowed[limit].largest)} {_pairs(limit, allowed)}" for limit in known]
    worst = extreme(found, "difference", largest=True)
    return (
        f"From process to process the same pass differs by at most {listed(told)}. The worst is "
        f"{worst['phase']} of {place(worst)}, {worst['precision']}: "
        f"{significant(worst['median_ms_a'])} ms in {worst['process_a']} and "
        f"{significant(worst['median_ms_b'])} ms in {worst['process_b']}.{_few(known, allowed)}"
    )


def _pairs(limit: Limit, allowed: dict[Limit, Tolerance]) -> str:
    return f"{WHERE[limit]} ({counted(allowed[limit].pairs, 'pair')})".strip()


def _few(known: list[Limit], allowed: dict[Limit, Tolerance]) -> str:
    """A bound from few pairs is none."""
    few = [limit for limit in known if allowed[limit].few]
    if not few:
        return ""
    which = listed(WHERE[limit] for limit in few)
    return (
        f" Fewer than {FEWEST_PAIRS} pairs are no bound: {f'{which} ' if which else ''}"
        f"the largest difference seen counts, and {percent(ACROSS_POINTS, 1)} at least."
    )
