"""Does the data-parallel chapter contradict itself?"""

from __future__ import annotations

from lmlab.writeup.collect import Collected
from lmlab.writeup.frames import data_parallel as frames
from lmlab.writeup.frames.data_parallel import Variant
from lmlab.writeup.frames.rank_jobs import Job, jobs
from lmlab.writeup.numbers import significant
from lmlab.writeup.paired import ratio_interval


def checks(collected: Collected) -> list[str]:
    """Warnings, job by job."""
    copy = collected.ceiling("ceilings", "copy_gb_per_s", "gb_per_s")
    return [warning for job in jobs(collected) for warning in _of_job(job, copy)]


def _of_job(job: Job, copy_gb_per_s: float | None) -> list[str]:
    known = frames.variants(job)
    silent = next((variant for variant in known if variant.name == frames.ALONE), None)
    return [
        warning
        for variant in known
        for warning in (
            faster_than_silence(job, variant, silent),
            lost_messages(job, variant),
            faster_than_a_copy(job, variant, copy_gb_per_s),
        )
        if warning is not None
    ]


def faster_than_silence(job: Job, variant: Variant, silent: Variant | None) -> str | None:
    """A step that talks cannot take less than one that does not."""
    if silent is None or variant.name == frames.ALONE:
        return None
    interval = ratio_interval(variant.samples_ms, silent.samples_ms)
    if interval is None or interval.high >= 0.98:
        return None
    return (
        f"{job.who}: {variant.label} takes {interval.ratio:.3g} times as long as a step without "
        "communication, which cannot be."
    )


def lost_messages(job: Job, variant: Variant) -> str | None:
    """The trace must hold every message that a variant says it sends."""
    sent, trace = variant.entry["messages"], variant.trace
    if not sent or trace["seen_as"] is None or trace["messages_seen"] == sent:
        return None
    return (
        f"{job.who}: {variant.label} sends {sent} messages, the trace has {trace['messages_seen']}."
    )


def faster_than_a_copy(job: Job, variant: Variant, copy_gb_per_s: float | None) -> str | None:
    """A message is read and written once at least, so no link beats the device's own copy."""
    under_way, sent = variant.trace["communication_ms"], variant.entry["message_bytes"]
    if copy_gb_per_s is None or not under_way or not sent:
        return None
    rate = sent / under_way / 1e6
    if rate <= copy_gb_per_s:
        return None
    return (
        f"{job.who}: the messages of {variant.label} travel at {significant(rate)} GB/s, a copy on "
        f"this machine reaches {significant(copy_gb_per_s)} GB/s."
    )
