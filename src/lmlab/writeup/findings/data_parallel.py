"""What the data-parallel chapter says: the cost of averaging, what overlap hides, which bucket."""

from __future__ import annotations

import statistics

from lmlab.writeup.collect import Collected
from lmlab.writeup.findings.rank_jobs import ranks, size, told, verdict, verdict_words
from lmlab.writeup.frames import data_parallel as frames
from lmlab.writeup.frames.data_parallel import Variant
from lmlab.writeup.frames.rank_jobs import MIB, Job, jobs
from lmlab.writeup.numbers import counted, listed, percent, significant, span, times
from lmlab.writeup.overhead_model import Fit, added_ms, best_messages
from lmlab.writeup.paired import ratio_interval
from lmlab.writeup.tables.data_parallel import CLAIM, LIMIT, size_of

# A model that misses more than this share of what it describes describes something else.
GOOD_FIT = 0.25
NEXT_TO_NOTHING = 0.02


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
            f"overlap_{job.key}": overlap(job),
            f"buckets_{job.key}": buckets(job),
            f"skew_{job.key}": skew(job),
            f"verdict_{job.key}": verdict(CLAIM, compared[2] if compared else None, LIMIT, job.who),
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
    apart = interval is not None and interval.low > 1
    if apart:
        assert interval is not None
        words = (
            f"{first.label} is fastest with a median step of {significant(first.median_ms)} ms, "
            f"{last.label} slowest with {significant(last.median_ms)} ms, "
            f"{times(interval.ratio)} as long"
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
    word = "longer" if interval.ratio > 1 else "shorter"
    return (
        f"{job.who}: sending gradients in {number} instead of {flat.entry['messages']}, one after "
        f"the other and after backward, makes a step {percent(abs(interval.ratio - 1), 2)} {word}."
    )


def overlap(job: Job) -> str:
    """What is hidden behind computation, by the profiler's intervals."""
    seen = [variant for variant in frames.talking(job) if variant.hidden is not None]
    if not seen:
        return f"{job.who}: the profiler saw no message, so nothing is said of overlap."
    during = [variant for variant in seen if variant.name.startswith(frames.DURING)]
    after = [v for v in seen if v not in during and v.name != frames.TORCH]
    parts = []
    if after:
        most = max(_share(variant) for variant in after)
        parts.append(
            f"{listed(v.label for v in after)}, which talk after backward, hide "
            + ("nothing" if most < NEXT_TO_NOTHING else f"at most {percent(most, 2)}")
        )
    if during:
        best = max(during, key=_share)
        parts.append(
            f"those that talk during it hide {_range(during)} of the time of their messages "
            f"(most: {best.label})"
        )
    torchs = [variant for variant in seen if variant.name == frames.TORCH]
    parts += [f"{v.label} hides {percent(_share(v), 2)}" for v in torchs]
    return f"{job.who}: {'; '.join(parts)}."


def _share(variant: Variant) -> float:
    return variant.hidden or 0.0


def _range(group: list[Variant]) -> str:
    low, high = (percent(find(map(_share, group)), 2) for find in (min, max))
    return low if low == high else f"{low} to {high}"


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
        f"{job.who}: the model fits with {link} and misses {percent(fitted.missed_share, 2)}. Its "
        f"best is {counted(number, 'message')} of {significant(mean_mib)} MiB, which would add "
        f"{significant(added)} ms; the fastest bucket measured is that of "
        f"{best.label.removeprefix('bucketed, ')}, which adds {_added(best)}."
    )


def _optimum(job: Job, fitted: Fit) -> tuple[int, float, float]:
    """Number of messages, their mean size in MiB, and what they would add."""
    total = max(sent.total_bytes for sent in frames.sent(job))
    backward = statistics.median(job.data["phases_ms"]["backward"])
    link = {"bytes_per_ms": fitted.bytes_per_ms, "call_ms": fitted.call_ms}
    number = best_messages(total, backward, **link)
    return number, total / number / MIB, added_ms(total, number, backward, **link)


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
