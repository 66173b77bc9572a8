"""What the data-parallel chapter says: the cost of averaging, what overlap hides, which bucket."""

from __future__ import annotations

import statistics

from lmlab.writeup.collect import Collected
from lmlab.writeup.findings.data_parallel_overlap import overlap, share
from lmlab.writeup.findings.rank_jobs import (
    ranks,
    ratio_words,
    size,
    told,
    verdict,
    verdict_words,
)
from lmlab.writeup.frames import data_parallel as frames
from lmlab.writeup.frames.data_parallel import Variant
from lmlab.writeup.frames.rank_jobs import MIB, Job, jobs
from lmlab.writeup.numbers import counted, percent, significant, span
from lmlab.writeup.overhead_model import Fit, added_ms, best_messages
from lmlab.writeup.paired import RatioInterval, ratio_interval
from lmlab.writeup.tables.data_parallel import CLAIM, LIMIT, size_of

# A model that misses more than this share of what it describes describes something else.
GOOD_FIT = 0.25


def findings(collected: Collected) -> dict[str, str]:
    """All findings by name, those of a job with its key."""
    measured = jobs(collected)
    sentences = {"summary": summary(measured), "ranks": ranks(collected)}
    for job in measured:
        compared = frames.against_torch(job)
        sentences |= {
            f"size_{job.key}": size(job, job.data["choice"], "these steps"),
            f"speed_{job.key}": speed(job),
            f"messages_{job.key}": messages(job),
            f"during_{job.key}": during(job),
            f"overlap_{job.key}": overlap(job),
            f"buckets_{job.key}": buckets(job),
            f"skew_{job.key}": skew(job),
            f"counts_{job.key}": counts(job),
            f"verdict_{job.key}": verdict(CLAIM, compared[2] if compared else None, LIMIT, job),
        }
    return told(measured, sentences)


def summary(measured: list[Job]) -> str:
    """The chapter in one sentence, for the abstract."""
    if not measured:
        return "Data parallelism was not measured."
    job = measured[0]
    ordered = _by_time(job)
    if not ordered:
        return f"No variant of data parallelism has a time on {job.who}."
    compared = [frames.against_torch(one) for one in measured]
    judged = verdict_words([each[2] if each else None for each in compared], LIMIT)
    return (
        f"Averaging the gradients of {size_of(job)} ({job.who}) adds "
        f"{_added(ordered[0])} to a step at best ({ordered[0].label}) and {_added(ordered[-1])} at "
        f"worst ({ordered[-1].label}); that {CLAIM} {judged}."
    )


def _by_time(job: Job) -> list[Variant]:
    return sorted(frames.talking(job), key=lambda variant: variant.median_ms)


def _added(variant: Variant) -> str:
    if variant.added_ms is None:
        return "an unknown time"
    return f"{significant(variant.added_ms)} ms" if variant.added_ms > 0 else "nothing measurable"


def speed(job: Job) -> str:
    """Fastest and slowest variant, and whether rounds tell them apart."""
    ordered = _by_time(job)
    failed = frames.failures(job)
    lost = "".join(f" {name} has no time: {reason}." for name, reason in failed.items())
    if len(ordered) < 2:
        return f"{job.who}: fewer than two variants have times.{lost}"
    first, last = ordered[0], ordered[-1]
    interval = ratio_interval(last.samples_ms, first.samples_ms)
    if interval is not None and interval.low > 1:
        words = (
            f"{first.label} is fastest with a median step of {significant(first.median_ms)} ms, "
            f"{last.label} slowest with {significant(last.median_ms)} ms; round by round that is "
            f"{ratio_words(interval, job)}"
        )
    else:
        words = (
            f"steps take {span([first.median_ms, last.median_ms])} ms, and rounds do not tell the "
            f"fastest ({first.label}) from the slowest ({last.label})"
        )
    return f"{job.who}: {words}.{lost}"


def messages(job: Job) -> str:
    """What it costs to send parameters one by one instead of together."""
    known = {variant.name: variant for variant in frames.talking(job)}
    if not {"naive", "flat"} <= set(known):
        return f"{job.who}: naive and flat were not both measured."
    naive, flat = known["naive"], known["flat"]
    number = counted(naive.entry["messages"], "message")
    interval = ratio_interval(naive.samples_ms, flat.samples_ms)
    if interval is None or interval.low <= 1 <= interval.high:
        return (
            f"{job.who}: sending gradients in {number} instead of "
            f"{flat.entry['messages']} makes no difference that these rounds show."
        )
    return (
        f"{job.who}: sending gradients in {number} instead of {flat.entry['messages']}, one after "
        f"the other and after backward, makes a step {_change(interval)} "
        f"({ratio_words(interval, job)})."
    )


def _change(interval: RatioInterval) -> str:
    word = "longer" if interval.ratio > 1 else "shorter"
    return f"{percent(abs(interval.ratio - 1), 2)} {word}"


def during(job: Job) -> str:
    """The same messages during backward instead of after it, by the clock."""
    known = {variant.name: variant for variant in frames.talking(job)}
    if not {"naive", "overlapped"} <= set(known):
        return f"{job.who}: naive and overlapped were not both measured."
    after, within = known["naive"], known["overlapped"]
    number = counted(within.entry["messages"], "message")
    interval = ratio_interval(within.samples_ms, after.samples_ms)
    same = f"{job.who}: sending the same {number} during backward instead of after it"
    if interval is not None and not interval.low <= 1 <= interval.high:
        words = f"{same} makes a step {_change(interval)} ({ratio_words(interval, job)})"
    else:
        words = f"{same} makes no difference that these rounds show"
    gains = interval is not None and interval.high < 1
    doubt = "" if gains or share(within) <= share(after) else DOUBT
    return f"{words}{doubt}."


DOUBT = "; what the profiler shows as hidden below, the clock does not confirm"


def buckets(job: Job) -> str:
    """Which bucket is best by the model and by measurement."""
    fitted = frames.overhead_fit(job)
    sweep = [v for v in frames.talking(job) if v.name.startswith("bucketed_")]
    if fitted is None or not sweep:
        return f"{job.who}: too few variants were measured to fit the model of the overhead."
    best = min(sweep, key=lambda variant: variant.median_ms)
    link = f"{fitted.gb_per_s:.3g} GB/s and {significant(fitted.call_ms, 2)} ms a message"
    if fitted.missed_share > GOOD_FIT:
        return (
            f"{job.who}: the model does not describe these times: fitted to {link} it misses "
            f"{percent(fitted.missed_share, 2)} of what was measured. The fastest bucket measured "
            f"is that of {best.label.removeprefix('bucketed, ')}."
        )
    number, mean_mib, added = _optimum(job, fitted)
    return (
        f"{job.who}: the model fits with {link} and misses {percent(fitted.missed_share, 2)} of "
        f"what was measured. Its best is {counted(number, 'message')} of {significant(mean_mib)} "
        f"MiB, which would add {significant(added)} ms; the fastest bucket measured is that of "
        f"{best.label.removeprefix('bucketed, ')}, which adds {_added(best)}. "
        f"{_told_apart(job, fitted, best, added)}"
    )


def _told_apart(job: Job, fitted: Fit, best: Variant, least_ms: float) -> str:
    """Whether the model is good enough to prefer its best to the best measured."""
    (sent,) = [one for one in frames.sent(job) if one.name == best.name]
    modelled = fitted.of(sent)
    saves, misses = modelled - least_ms, fitted.missed_ms
    told = (
        f"more than the {significant(misses, 2)} ms that it misses: its best is worth trying"
        if saves > misses
        else f"and it misses {significant(misses, 2)} ms: it does not tell the two apart"
    )
    return (
        f"For that one it says {significant(modelled)} ms, {significant(saves, 2)} ms above its "
        f"best, {told}."
    )


def _optimum(job: Job, fitted: Fit) -> tuple[int, float, float]:
    """Number of messages, their mean size in MiB, and what they would add."""
    total = max(sent.total_bytes for sent in frames.sent(job))
    backward = statistics.median(job.data["phases_ms"]["backward"])
    link = {"bytes_per_ms": fitted.bytes_per_ms, "call_ms": fitted.call_ms}
    number = best_messages(total, backward, **link)
    return number, total / number / MIB, added_ms(total, number, backward, **link)


def counts(job: Job) -> str:
    """In how many messages ours and PyTorch's send, with buckets of one size."""
    compared = frames.against_torch(job)
    if compared is None or compared[1].trace["seen_as"] is None:
        return f"{job.who}: messages of ours and PyTorch's were not both seen."
    ours, theirs = compared[0].entry["messages"], compared[1].trace["messages_seen"]
    return (
        f"{job.who}: with buckets of {job.data['torch_bucket_mb']:g} MB ours sends "
        f"{counted(ours, 'message')} in a step, PyTorch's {theirs:,}."
    )


def skew(job: Job) -> str:
    """How far ranks drift apart within a step."""
    shares = {v.label: v.skew_ms / v.median_ms for v in frames.variants(job)}
    if not shares:
        return f"{job.who}: no step was timed."
    most = max(shares, key=lambda name: shares[name])
    return (
        f"{job.who}: the first and the last rank of a step finish at most "
        f"{percent(shares[most], 2)} of the step apart ({most})."
    )
