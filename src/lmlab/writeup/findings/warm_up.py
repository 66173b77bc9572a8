"""What is measured when warm-up is dropped, and when a fresh process reaches its pace."""

from __future__ import annotations

import pandas as pd

from lmlab.writeup.frames import end_to_end as frames
from lmlab.writeup.frames.cold_start import TOLERANCE, traces
from lmlab.writeup.numbers import counted, listed, percent, span
from lmlab.writeup.places import named


def warmup_effect(data: pd.DataFrame) -> str:
    """The fewest warm-ups against the most, size by size."""
    rows = frames.of(frames.measured(frames.cold(data)), phase="total")
    counts = sorted(set(rows["warmup"]))
    if len(counts) < 2:
        return (
            "What dropping warm-up does is not known: fewer than two warm-up counts were measured."
        )
    few, many = counts[0], counts[-1]
    ratios = _ratios(rows, few, many)
    if not len(ratios):
        return (
            "What dropping warm-up does is not known: no size has both ends of the warm-up range."
        )
    start = f"{_after(few).capitalize()} the mean step takes"
    longer = ratios[ratios["ratio"] > 1 + TOLERANCE]
    shorter = ratios[ratios["ratio"] < 1 - TOLERANCE]
    sizes = list(ratios["size"])
    if len(longer):
        text = (
            f"{start} {_times(longer)} as long as {_after(many)} for {named(longer['size'], sizes)}"
        )
        return f"{text}{_unaffected(ratios, longer)}.{_deviations(longer)}{_first_step(data, few)}"
    if len(shorter):
        return (
            f"{start} less time than {_after(many)} for {named(shorter['size'], sizes)}: "
            f"{_times(shorter)} as long, which warm-up does not explain."
        )
    return f"{start} the same as {_after(many)}, within {percent(TOLERANCE, 2)}, for every size."


def enough_warmup(data: pd.DataFrame) -> str:
    """The smallest warm-up count that gives the mean of the largest."""
    rows = frames.of(frames.measured(frames.cold(data)), phase="total")
    counts = sorted(set(rows["warmup"]))
    if len(counts) < 2:
        return (
            "How much warm-up is enough is not known: fewer than two warm-up counts were measured."
        )
    parts = []
    for size in frames.order(rows, "size"):
        good = [
            count
            for count in counts[:-1]
            if _all_close(_ratios(frames.of(rows, size=size), count, counts[-1]))
        ]
        parts.append((size, good[0] if good else None))
    enough = [(size, count) for size, count in parts if count is not None]
    not_enough = [str(size) for size, count in parts if count is None]
    return " ".join(
        filter(
            None,
            [
                _enough(enough, [size for size, _ in parts], counts[-1]),
                _not_enough(not_enough, counts),
            ],
        )
    )


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
        f"at step {step} for {named(sizes, every)}"
        for step, sizes in sorted((step, n) for step, n in steps.items() if step is not None)
    ]
    told = [f"A fresh process settles {listed(settled)}."] if settled else []
    if None in steps:
        told.append(f"It does not settle within the steps taken for {named(steps[None], every)}.")
    return " ".join(told)


def _ratios(rows: pd.DataFrame, few: int, many: int) -> pd.DataFrame:
    both = frames.pairs(frames.of(rows, warmup=few), frames.of(rows, warmup=many), ["size"])
    return both.assign(ratio=both["mean_ms_a"] / both["mean_ms_b"])


def _all_close(ratios: pd.DataFrame) -> bool:
    return len(ratios) > 0 and bool((ratios["ratio"] - 1).abs().le(TOLERANCE).all())


def _after(count: int) -> str:
    return f"after {counted(count, 'warm-up')}" if count else "without warm-up"


def _times(ratios: pd.DataFrame) -> str:
    return f"{span(ratios['ratio'], 2)} times"


def _unaffected(ratios: pd.DataFrame, longer: pd.DataFrame) -> str:
    rest = [size for size in ratios["size"] if size not in set(longer["size"])]
    return f", and no longer for {listed(map(str, rest))}" if rest else ""


def _deviations(ratios: pd.DataFrame) -> str:
    known = ratios[ratios["sd_ms_a"].notna() & ratios["sd_ms_b"].gt(0)]
    if not len(known):
        return ""
    return (
        f" Its standard deviation is {span(known['sd_ms_a'] / known['sd_ms_b'], 2)} times as large."
    )


def _first_step(data: pd.DataFrame, count: int) -> str:
    rows = frames.of(traces(data), warmup=count)
    first = [row["samples_ms"][0] / row["settled_ms"] for _, row in rows.iterrows()]
    return f" The first measured step alone takes {span(first, 2)} times the settled pace."


def _enough(pairs: list[tuple[object, int]], every: list[object], many: int) -> str:
    if not pairs:
        return ""
    by_count: dict[int, list[str]] = {}
    for size, count in pairs:
        by_count.setdefault(count, []).append(str(size))
    told = [
        f"{counted(count, 'warm-up') if count else 'no warm-up'} for {named(sizes, every)}"
        for count, sizes in sorted(by_count.items())
    ]
    return f"The mean after {many} is reached, within {percent(TOLERANCE, 2)}, with {listed(told)}."


def _not_enough(sizes: list[str], counts: list[int]) -> str:
    if not sizes:
        return ""
    return f"For {listed(sizes)} {counts[-2]} are not yet enough."
