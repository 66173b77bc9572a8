"""Captions made from the rows they describe.

A table captioned "NCCL" that was taken on gloo is a known fault of hand-written captions. Here
each phrase is read off the results behind the table, and where they disagree the caption says
between what and how often instead of naming the first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from lmlab.study.results import Result
from lmlab.writeup.numbers import listed

CLOCKS = {"host": "synchronised host clock", "cuda_events": "CUDA events"}


def _warmups(count: int) -> str:
    return f"{count} warm-up{'' if count == 1 else 's'}" if count else "no warm-up"


PARAMETER_PHRASES: dict[str, Callable[[Any], str]] = {
    "batch": lambda value: f"batch {value}",
    "attention": lambda value: f"{value} attention",
    "warmup": _warmups,
    "start": lambda value: f"{value} start",
}


def describe(
    results: Sequence[Result], phases: Iterable[str] = (), columns: Iterable[str] = ()
) -> str:
    """Device, settings and statistics of these results, as one sentence.

    Parameters that are columns of the table say themselves what they are and are left out.
    """
    ok = [result for result in results if result.status == "ok"]
    if not ok:
        return "Nothing measured."
    wanted = set(phases)
    measurements = [
        measurement
        for result in ok
        for name, measurement in result.measurements.items()
        if not wanted or name in wanted
    ]
    phrases = [
        _agreed("device", map(device_of, ok)),
        *_setup(ok),
        *_parameters(ok, set(columns)),
        _agreed("clock", (CLOCKS[m["clock"]] for m in measurements)),
        _agreed("cache", (f"{m['cache']} cache" for m in measurements if m["cache"] != "warm")),
        _sample_count([int(m["n"]) for m in measurements]),
    ]
    return f"{', '.join(phrase for phrase in phrases if phrase)}."


def with_reasons(said: str, results: Sequence[Result]) -> str:
    """A caption, and why points of its table are unsupported: every reason once."""
    counts = Counter(str(r.reason) for r in results if r.status == "unsupported")
    told = "; ".join(f"{reason} ({_points(count)})" for reason, count in counts.items())
    return f"{said} Unsupported: {told}." if told else said


def _points(count: int) -> str:
    return f"{count} point{'' if count == 1 else 's'}"


def device_of(result: Result) -> str:
    """The device's own name; a CPU's is marked as one."""
    name = str(result.machine["name"])
    return f"{name} (CPU)" if result.machine["device"] == "cpu" else name


def _setup(results: Sequence[Result]) -> list[str]:
    gpu = [result for result in results if result.machine["device"] == "cuda"]
    cpu = [result for result in results if result.machine["device"] == "cpu"]
    return [
        _agreed("threads", (_threads(r.data["threads"]) for r in cpu if "threads" in r.data)),
        _agreed("TF32", (f"TF32 {_on(r.data['tf32'])}" for r in gpu if "tf32" in r.data)),
    ]


def _parameters(results: Sequence[Result], shown: set[str]) -> list[str]:
    return [
        _agreed(key, (phrase(r.parameters[key]) for r in results if key in r.parameters))
        for key, phrase in PARAMETER_PHRASES.items()
        if key not in shown
    ]


def _agreed(what: str, phrases: Iterable[str]) -> str:
    """The one phrase, or which ones there are and how often."""
    counts = Counter(phrases)
    if len(counts) < 2:
        return next(iter(counts), "")
    return f"{what} differs between rows: {listed(f'{p} ({n})' for p, n in counts.items())}"


def _sample_count(counts: Sequence[int]) -> str:
    if not counts:
        return ""
    low, high = min(counts), max(counts)
    return f"n = {low}" if low == high else f"n differs: {low} to {high}"


def _on(flag: bool) -> str:
    return "on" if flag else "off"


def _threads(count: int) -> str:
    return f"{count} thread{'' if count == 1 else 's'}"
