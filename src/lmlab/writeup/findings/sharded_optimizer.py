"""What the sharded optimizer's chapter says: what it saves, what it costs, what devices show."""

from __future__ import annotations

from lmlab.writeup.collect import Collected
from lmlab.writeup.findings import rank_memory
from lmlab.writeup.findings.rank_jobs import (
    cut_short,
    interval_words,
    ranks,
    size,
    told,
    verdict,
    verdict_words,
)
from lmlab.writeup.frames import sharded_optimizer as frames
from lmlab.writeup.frames.moments import FULL_AT, highest, part_bytes
from lmlab.writeup.frames.rank_jobs import Job, jobs
from lmlab.writeup.numbers import binary_bytes, percent, significant
from lmlab.writeup.tables.sharded_optimizer import CLAIM, LIMIT, memory_size

EVEN = 0.001
"""A share off by less than this is even."""


def findings(collected: Collected) -> dict[str, str]:
    """All findings by name, those of a job with its key."""
    measured = jobs(collected)
    sentences = {"summary": summary(measured), "ranks": ranks(collected)}
    for job in measured:
        sentences |= {
            f"size_{job.key}": size(job, job.data["time"]["choice"], "the times"),
            f"saved_{job.key}": saved(job),
            f"device_{job.key}": device(job),
            f"expected_{job.key}": expected(job),
            f"cost_{job.key}": cost(job),
            f"zero_{job.key}": zero(job),
            f"verdict_{job.key}": verdict(CLAIM, frames.against(job, frames.TORCH), LIMIT, job),
        }
    return told(measured, sentences)


def summary(measured: list[Job]) -> str:
    """The chapter in one sentence, for the abstract."""
    if not measured:
        return "The sharded optimizer was not measured."
    job = measured[0]
    judged = verdict_words([frames.against(one, frames.TORCH) for one in measured], LIMIT)
    return (
        f"Sharding the optimizer state of {memory_size(job)} ({job.who}) takes a "
        f"rank from {_state(job, frames.PLAIN)} of it to {_state(job, frames.OURS)}; that {CLAIM} "
        f"{judged}."
    )


def _state(job: Job, arm: str) -> str:
    return binary_bytes(max(frames.state_bytes(frames.memory_arms(job)[arm])))


def saved(job: Job) -> str:
    """State and total with and without sharding."""
    arms = frames.memory_arms(job)
    plain = highest(arms[frames.PLAIN]["ranks"], "after_step")["allocated_bytes"]
    ours = highest(arms[frames.OURS]["ranks"], "after_step")["allocated_bytes"]
    words = "saves" if ours < plain else "saves nothing: it takes"
    return (
        f"{job.who}: after a step of {memory_size(job)} a rank holds {_state(job, frames.OURS)} of "
        f"optimizer state instead of {_state(job, frames.PLAIN)}, and {binary_bytes(ours)} instead "
        f"of {binary_bytes(plain)} in all; that {words} {percent(abs(1 - ours / plain), 2)}"
        f"{'' if ours < plain else ' more'}."
        f"{rank_memory.peaks(arms, frames.PLAIN, frames.OURS, frames.WITH)}"
    )


def device(job: Job) -> str:
    """What the device reports after a step, and where more although tensors hold less."""
    return rank_memory.device(job, frames.memory_arms(job), frames.WITH, frames.PLAIN)


def expected(job: Job) -> str:
    """Whether the parts are as large as the cost model says."""
    model = job.data["memory"]["expected"]
    if model is None:
        return rank_memory.expected(job, None)
    arms, off = frames.memory_arms(job), {}
    for part, moment in FULL_AT.items():
        sharded = model[part] / job.world_size if part == "optimizer_state" else model[part]
        for name, wanted in ((frames.PLAIN, model[part]), (frames.OURS, sharded)):
            found = part_bytes(arms[name]["ranks"], moment, part)
            off[f"{part.replace('_', ' ')} of {frames.LABELS[name]}"] = found / wanted - 1
    return rank_memory.expected(job, off)


def cost(job: Job) -> str:
    """What sharding does to the optimizer's time."""
    interval, lost = frames.against(job, frames.PLAIN), _lost(job)
    if interval is None:
        return f"{job.who}: the optimizers were not timed beside each other.{lost}"
    size_taken = job.data["time"]["choice"]["size"]
    told = f"{interval_words(interval, job)}{cut_short(interval, job)}{_whole_step(job)}"
    if interval.low <= 1 <= interval.high:
        return (
            f"{job.who}: on {size_taken}, rounds do not tell the sharded optimizer's phase from "
            f"that of AdamW on every rank ({told}): less arithmetic and more messages weigh about "
            f"the same.{lost}"
        )
    if interval.ratio > 1:
        return (
            f"{job.who}: on {size_taken} the sharded optimizer's phase takes {interval.ratio:.3g} "
            f"times as long as AdamW on every rank ({told}): sending the parameters costs more "
            f"than the arithmetic that it spares.{lost}"
        )
    return (
        f"{job.who}: on {size_taken} the sharded optimizer's phase takes {interval.ratio:.3g} "
        f"times as long as AdamW on every rank ({told}): the arithmetic that it spares is worth "
        f"more than the messages that it adds.{lost}"
    )


def _whole_step(job: Job) -> str:
    """The same ratio of the step around the phase."""
    interval = frames.steps_against(job, frames.PLAIN)
    return "" if interval is None else f"; the whole step {significant(interval.ratio)} times"


def _lost(job: Job) -> str:
    """Optimizers that got no time, and why."""
    return "".join(
        f" {frames.LABELS[name]} has no time: {arm['reason']}."
        for name, arm in frames.memory_arms(job).items()
        if arm["status"] != "ok"
    )


def zero(job: Job) -> str:
    """What differs from stage 1 of ZeRO, computed."""
    computed = frames.volumes(job)
    uneven = computed.state_share / computed.even_share - 1
    keeps = f"the fullest rank keeps {percent(computed.state_share, 4)} of the state"
    balance = (
        f"parameters are not cut, yet whole tensors divide evenly enough: {keeps}"
        if uneven < EVEN
        else f"parameters are not cut, and whole tensors do not divide evenly: {keeps}, "
        f"{percent(uneven, 2)} more than an even cut would give it"
    )
    return (
        f"{job.who}: {balance}. A rank sends {binary_bytes(computed.ours)} in a step where stage 1 "
        f"of ZeRO sends {binary_bytes(computed.zero)}, since gradients are averaged everywhere and "
        "not only where they are needed."
    )
