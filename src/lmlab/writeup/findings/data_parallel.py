"""What the data-parallel chapter says: the cost of averaging, what overlap hides, which bucket."""

from __future__ import annotations

from collections.abc import Mapping

from lmlab.writeup.collect import Collected
from lmlab.writeup.findings.data_parallel_buckets import added_words, buckets
from lmlab.writeup.findings.data_parallel_overlap import overlap, share
from lmlab.writeup.findings.rank_jobs import (
    cut_short,
    ranks,
    ratio_words,
    size,
    told,
    verdict,
    verdict_words,
)
from lmlab.writeup.frames import data_parallel as frames
from lmlab.writeup.frames.data_parallel import Variant
from lmlab.writeup.frames.rank_jobs import Job, jobs
from lmlab.writeup.numbers import counted, listed, percent, significant, span
from lmlab.writeup.paired import RatioInterval, ratio_interval
from lmlab.writeup.tables.data_parallel import CLAIM, LIMIT, size_of


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
    best, worst = ordered[0], ordered[-1]
    return (
        f"Averaging the gradients of {size_of(job)} ({job.who}) adds {added_words(best)} to a step "
        f"at best ({best.label}) and {added_words(worst)} at worst ({worst.label}); that {CLAIM} "
        f"{judged}."
    )


def _by_time(job: Job) -> list[Variant]:
    return sorted(frames.talking(job), key=lambda variant: variant.median_ms)


def speed(job: Job) -> str:
    """Fastest and slowest variant, and which ones rounds do not tell from the fastest."""
    ordered = _by_time(job)
    failed = frames.failures(job)
    lost = "".join(f" {name} has no time: {reason}." for name, reason in failed.items())
    if len(ordered) < 2:
        return f"{job.who}: fewer than two variants have times.{lost}"
    first, last = ordered[0], ordered[-1]
    interval = ratio_interval(last.samples_ms, first.samples_ms)
    if interval is None or interval.low <= 1:
        return (
            f"{job.who}: steps take {span([first.median_ms, last.median_ms])} ms, and rounds do "
            f"not tell the fastest ({first.label}) from the slowest ({last.label}).{lost}"
        )
    return (
        f"{job.who}: {first.label} is fastest with a median step of "
        f"{significant(first.median_ms)} ms, {last.label} slowest with "
        f"{significant(last.median_ms)} ms; round by round that is {ratio_words(interval, job)}"
        f"{cut_short(interval, job)}.{_like_the_fastest(ordered)} {ONE_PAIR}{lost}"
    )


ONE_PAIR = "Intervals are of one pair each, not adjusted for how many pairs there are."


def _like_the_fastest(ordered: list[Variant]) -> str:
    """The variants that rounds do not tell from the fastest."""
    alike = [v.plain_label for v in ordered[1:] if not _told(v, ordered[0])]
    return f" Rounds do not tell the fastest from {listed(alike)}." if alike else ""


def _told(one: Variant, other: Variant) -> RatioInterval | None:
    """The ratio of two variants where rounds tell them apart."""
    interval = ratio_interval(one.samples_ms, other.samples_ms)
    if interval is None or interval.low <= 1 <= interval.high:
        return None
    return interval


def messages(job: Job) -> str:
    """What it costs to send parameters one by one instead of together."""
    known = {variant.name: variant for variant in frames.talking(job)}
    if not {"naive", "flat"} <= set(known):
        return f"{job.who}: naive and flat were not both measured."
    naive, flat = known["naive"], known["flat"]
    number = counted(naive.entry["messages"], "message")
    interval = ratio_interval(naive.samples_ms, flat.samples_ms)
    if interval is None:
        return f"{job.who}: too few rounds were taken to compare naive with flat."
    if interval.low <= 1 <= interval.high:
        return (
            f"{job.who}: sending gradients in {number} instead of {flat.entry['messages']} makes "
            f"no difference that these rounds show ({ratio_words(interval, job)})."
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
    """Sending during backward instead of after it, by the clock."""
    known = {variant.name: variant for variant in frames.talking(job)}
    within = [variant for variant in known.values() if variant.name.startswith(frames.DURING)]
    parts = [_same_messages(job, known), _beside_flat(known.get("flat"), within)]
    told = " ".join(filter(None, parts))
    if not told:
        return f"{job.who}: no variant that talks during backward was measured beside one after it."
    after = [known[name] for name in ("naive", "flat") if name in known]
    gains = any((ratio := _told(w, a)) and ratio.high < 1 for w in within for a in after)
    hides = max(map(share, within)) > max(map(share, after))
    return f"{job.who}: {told}{DOUBT if hides and not gains else ''}"


def _same_messages(job: Job, known: Mapping[str, Variant]) -> str:
    """Naive and overlapped send the same messages, but not in the same way."""
    if not {"naive", "overlapped"} <= set(known):
        return ""
    interval = ratio_interval(known["overlapped"].samples_ms, known["naive"].samples_ms)
    if interval is None:
        return ""
    number = counted(known["overlapped"].entry["messages"], "message")
    same = f"sending the same {number} during backward, several at once, instead of one by one"
    if interval.low <= 1 <= interval.high:
        told = f"makes no difference that these rounds show ({ratio_words(interval, job)})"
    else:
        told = f"makes a step {_change(interval)} ({ratio_words(interval, job)})"
    return f"{same} after it {told}."


def _beside_flat(flat: Variant | None, within: list[Variant]) -> str:
    """How many of the variants that talk during backward are faster than one message after it."""
    if flat is None or not within:
        return ""
    told = {variant.plain_label: ratio for variant in within if (ratio := _told(variant, flat))}
    parts = []
    for word, found in (
        ("faster", {name: r for name, r in told.items() if r.ratio < 1}),
        ("slower", {name: r for name, r in told.items() if r.ratio > 1}),
    ):
        if found:
            ratios = span([ratio.ratio for ratio in found.values()])
            parts.append(f"{listed(found)} {_are(len(found))} {word} ({ratios} times its step)")
    alike = [v.plain_label for v in within if v.plain_label not in told]
    if alike:
        parts.append(f"rounds do not tell {listed(alike)} from it")
    number = counted(flat.entry["messages"], "message")
    return f"Beside flat ({number} after backward), {'; '.join(parts)}."


def _are(count: int) -> str:
    return "is" if count == 1 else "are"


DOUBT = " What the profiler shows as hidden below, the clock does not confirm."


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
    known = frames.variants(job)
    if not known:
        return f"{job.who}: no step was timed."
    usual = max(known, key=_usual_skew)
    worst = max(known, key=lambda variant: variant.worst_skew_share)
    return (
        f"{job.who}: the first and the last rank of a step finish at most "
        f"{percent(_usual_skew(usual), 2)} of the step apart in the median round ({usual.label}), "
        f"and at most {percent(worst.worst_skew_share, 2)} in any round ({worst.label})."
    )


def _usual_skew(variant: Variant) -> float:
    return variant.skew_ms / variant.median_ms
