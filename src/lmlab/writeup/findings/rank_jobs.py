"""Sentences that the chapters of several ranks share: who took part, which size, a verdict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lmlab.writeup.collect import Collected
from lmlab.writeup.frames.rank_jobs import Job, jobs, left_out
from lmlab.writeup.numbers import hidden_words, listed, percent, significant
from lmlab.writeup.paired import CONFIDENCE, DifferenceInterval, RatioInterval, judge


def ranks(collected: Collected) -> str:
    """Who took part, and who could not."""
    measured = jobs(collected)
    missing = left_out(collected)
    if not measured:
        return f"No job of several ranks was measured here. {missing}".strip()
    who = f"Measured on {listed(job.who for job in measured)}."
    note = SHARED_NOTE if any(job.shared for job in measured) else ""
    return " ".join(filter(None, [who, note, missing]))


SHARED_NOTE = (
    "Ranks that share one GPU take turns on it, and their messages travel through the host: such "
    "times compare variants with each other, and say nothing of GPUs with links of their own."
)


def told(measured: Sequence[Job], sentences: Mapping[str, str]) -> dict[str, str]:
    """Sentences name their ranks; where there is one job only, that goes without saying."""
    if len(measured) != 1:
        return dict(sentences)
    said = f"{measured[0].who}: "
    return {
        name: _capital(text.removeprefix(said)) if text.startswith(said) else text
        for name, text in sentences.items()
    }


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def size(job: Job, choice: Mapping[str, Any], what: str) -> str:
    """Which size was taken and why larger ones were not."""
    left = "; ".join(f"{one['size']}: {one['reason']}" for one in choice["left_out"])
    taken = f"{job.who}: the size taken for {what} is {choice['size']}"
    rate = (
        f"A short trial all-reduce moves {choice['all_reduce_gb_per_s']:.3g} GB/s between these "
        "ranks: a probe for this choice, which differs from job to job."
    )
    reasons = f" Left: {left}." if left else ""
    if choice["over_limit"]:
        why = f"the smallest, although its step takes {choice['step_s']:.3g} s"
    elif left:
        limit = job.result.settings["step_limit_s"]
        why = f"the largest that fits and keeps its step under {limit:g} s"
    else:
        why = "the largest of the study"
    return f"{taken}, {why}. {rate}{reasons}"


def share_range(shares: Sequence[float]) -> str:
    """`14 % to 25 %`, or the one value when both ends print the same."""
    low, high = (hidden_words(find(shares)) for find in (min, max))
    return low if low == high else f"{low} to {high}"


def verdict(claim: str, interval: RatioInterval | None, limit: float, job: Job) -> str:
    """A claim of speed and what the interval makes of it."""
    if interval is None:
        return f"{job.who}: whether {claim} was not measured."
    judged = judge(interval, limit)
    span = f"{ratio_words(interval, job)}{cut_short(interval, job)}"
    if judged == "pass":
        return f"{job.who}: {claim}{FASTER if interval.high < 1 else ''} ({span})."
    if judged == "fail":
        return f"{job.who}: it is not so that {claim} ({span})."
    return f"{job.who}: whether {claim} is AMBIGUOUS, the interval holds both answers ({span})."


FASTER = ": it is faster"
"""Where a claim of not being slower is more than true."""


def ratio_words(interval: RatioInterval, job: Job) -> str:
    """`1.412 times, 95 % interval 1.106 to 1.802, 3 of 8 rounds`."""
    return f"{interval.ratio:.3f} times, {interval_words(interval, job)}"


def interval_words(interval: RatioInterval, job: Job) -> str:
    """`95 % interval 1.106 to 1.802, 3 of 8 rounds`."""
    places = 3 if interval.high < TEN else 1
    low, high = (f"{end:.{places}f}" for end in (interval.low, interval.high))
    return _ends_and_rounds(f"{low} to {high}", interval.rounds, job)


def difference_words(interval: DifferenceInterval, job: Job) -> str:
    """`95 % interval 75.1 to 773 ms, 4 of 8 rounds`."""
    low, high = (significant(end) for end in (interval.low, interval.high))
    return _ends_and_rounds(f"{low} to {high} ms", interval.rounds, job)


def _ends_and_rounds(ends: str, rounds: int, job: Job) -> str:
    return f"{percent(CONFIDENCE, 2)} interval {ends}, {job.rounds(rounds)} rounds"


def cut_short(interval: RatioInterval, job: Job) -> str:
    """Why there are fewer rounds than asked for."""
    return "" if job.took_all(interval.rounds) else ", then the time was up"


TEN = 10.0
"""From here on a ratio is told to a tenth."""


def verdict_words(intervals: Sequence[RatioInterval | None], limit: float) -> str:
    """All verdicts of a chapter in a few words, for its summary."""
    known = [interval for interval in intervals if interval is not None]
    judged = {judge(interval, limit) for interval in known}
    if not judged:
        return "not measured"
    if all(interval.high < 1 for interval in known):
        return f"holds{FASTER}"
    words = {"pass": "holds", "fail": "does not hold", "AMBIGUOUS": "is AMBIGUOUS"}
    return listed(words[one] for one in ("pass", "fail", "AMBIGUOUS") if one in judged)
