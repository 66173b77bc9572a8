"""Latency and bandwidth of the collectives: what the fitted lines say, and where none fits."""

from __future__ import annotations

import pandas as pd

from lmlab.writeup.findings.collectives_doubts import from_on, up_to
from lmlab.writeup.frames import collectives as frames
from lmlab.writeup.frames.collectives import FIRST, OPERATIONS
from lmlab.writeup.numbers import percent, significant, span
from lmlab.writeup.places import extreme


def fit(data: pd.DataFrame) -> str:
    """Latency and bandwidth of an all-reduce, and how well the line holds."""
    lines = frames.fits(data)
    here = frames.of(frames.between_ranks(lines), operation=FIRST)
    if not len(here):
        return "No line could be fitted: an all-reduce has too few measured sizes."
    first = frames.of(here, dtype=frames.order(here, "dtype")[0])
    told = [
        f"{_latency(row['latency_ms'])} and {significant(row['bus_gb_per_s'])} GB/s with "
        f"{row['arm']}"
        for _, row in first.iterrows()
    ]
    worst = extreme(first, "worst_error", largest=True)
    return (
        f"As latency and bus bandwidth, all-reduce in {first.iloc[0]['dtype']}: {'; '.join(told)}. "
        f"These lines are off by at most {percent(worst['worst_error'], 2)} ({worst['arm']})"
        f"{_other_lines(data, lines, first)}.{_shaky_latencies(data, first)}"
    )


def _shaky_latencies(data: pd.DataFrame, lines: pd.DataFrame) -> str:
    """Whether the times that decide a latency scatter, so that another process has another one."""
    small, _ = frames.halves(data)
    cases = frames.of(frames.between_ranks(data), operation=FIRST, dtype=lines.iloc[0]["dtype"])
    cases = cases[cases["size_bytes"].map(frames.nominal_mib).isin(small)]
    if len(lines) < 2 or not cases["noisy"].any():
        return ""
    return (
        f" Each line is of one job, and {cases['noisy'].sum()} of {len(cases)} times "
        f"{up_to(frames.halves(data))}, which decide a latency, are noisy: do not compare the "
        "latencies of different sets of ranks."
    )


def _other_lines(data: pd.DataFrame, lines: pd.DataFrame, told: pd.DataFrame) -> str:
    """How far off the lines are of which nothing else is said."""
    others = frames.between_ranks(lines).drop(told.index)
    if not len(others):
        return ""
    worst = extreme(others, "worst_error", largest=True)
    return (
        f", those of other operations and formats by up to {percent(worst['worst_error'], 2)} "
        f"({OPERATIONS[worst['operation']].lower()}, {worst['dtype']}, {worst['arm']}"
        f"{_two_rates(frames.of(data, **worst[frames.KIND]), frames.halves(data))})"
    )


def _two_rates(cases: pd.DataFrame, halves: tuple[list[int], list[int]]) -> str:
    """Why no line fits: small and large sizes that have nothing in common."""
    sizes = cases["size_bytes"].map(frames.nominal_mib)
    small, large = (cases["bus_gb_per_s"][sizes.isin(half)] for half in halves)
    if not len(small) or not len(large) or small.min() <= large.max():
        return ""
    return (
        f": {span(small)} GB/s {up_to(halves)} and {span(large)} {from_on(halves)}, which no one "
        "line fits"
    )


def _latency(milliseconds: float) -> str:
    return f"{significant(milliseconds, 2)} ms" if milliseconds > 0 else "no latency"
