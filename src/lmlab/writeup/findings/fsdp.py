"""What the FSDP chapter says: memory, speed, whether weights come in time."""

from __future__ import annotations

from lmlab.writeup.collect import Collected
from lmlab.writeup.findings import rank_memory
from lmlab.writeup.findings.data_parallel_overlap import ONE_STEP
from lmlab.writeup.findings.fsdp_waits import waits
from lmlab.writeup.findings.rank_jobs import (
    ranks,
    share_range,
    size,
    told,
    verdict,
    verdict_words,
)
from lmlab.writeup.frames import fsdp as frames
from lmlab.writeup.frames.moments import FULL_AT, MOMENTS, PARTS, highest, part_bytes
from lmlab.writeup.frames.rank_jobs import Job, hideable, jobs, rank_shares
from lmlab.writeup.numbers import binary_bytes, counted, listed, percent, significant
from lmlab.writeup.tables.fsdp import CLAIM, LIMIT, size_of

AS_MANY = 0.1
"""Bytes, or rates, that differ by less are about the same."""
SCATTERS_SEND_MORE = " (gloo sends more for a scatter than it must)"


def findings(collected: Collected) -> dict[str, str]:
    """All findings by name, those of a job with its key."""
    measured = jobs(collected)
    sentences = {"summary": summary(measured), "ranks": ranks(collected)}
    for job in measured:
        sentences |= {
            f"size_{job.key}": size(job, job.data["choice"], "this chapter"),
            f"memory_{job.key}": memory(job),
            f"expected_{job.key}": expected(job),
            f"device_{job.key}": device(job),
            f"speed_{job.key}": speed(job),
            f"messages_{job.key}": messages(job),
            f"waits_{job.key}": waits(job),
            f"overlap_{job.key}": overlap(job),
            f"verdict_{job.key}": verdict(CLAIM, frames.against(job, frames.TORCH), LIMIT, job),
        }
    return told(measured, sentences)


def summary(measured: list[Job]) -> str:
    """The chapter in one sentence, for the abstract."""
    if not measured:
        return "FSDP was not measured."
    job = measured[0]
    held = _held(job)
    if not {frames.DDP, frames.OURS} <= set(held):
        return f"FSDP and data parallelism were not both measured on {job.who}."
    judged = verdict_words([frames.against(one, frames.TORCH) for one in measured], LIMIT)
    return (
        f"FSDP ({job.who}) takes a rank of {size_of(job)} from "
        f"{binary_bytes(held[frames.DDP])} to {binary_bytes(held[frames.OURS])} after a step; that "
        f"{CLAIM} {judged}."
    )


def _held(job: Job) -> dict[str, int]:
    """Bytes of tensors on the fullest rank after the step, by arm."""
    return {
        name: int(highest(arm["ranks"], "after_step")["allocated_bytes"])
        for name, arm in frames.with_memory(job).items()
    }


def memory(job: Job) -> str:
    """Who holds least, and where the largest difference lies."""
    held = _held(job)
    if frames.DDP not in held or len(held) < 2:
        return f"{job.who}: memory was not read of two arms that could be compared."
    base = held[frames.DDP]
    shares = [
        f"{percent(count / base, 2)} with {frames.WITH[name]}"
        for name, count in held.items()
        if name != frames.DDP
    ]
    moment = _highest_moment(job)
    why = ": activations are not sharded" if moment == "after_forward" else ""
    arms = frames.with_memory(job)
    return (
        f"{job.who}: after a step data parallelism holds {binary_bytes(base)} of tensors on a "
        f"rank; it is {listed(shares)}. Of these moments FSDP holds most {MOMENTS[moment]}{why}."
        f"{rank_memory.peaks(arms, frames.DDP, frames.OURS, frames.WITH)}"
    )


def expected(job: Job) -> str:
    """Whether the parts are as large as the cost model and the number of ranks say."""
    off: dict[str, float] = {}
    for name, arm in frames.with_memory(job).items():
        wanted = frames.expected_bytes(job, name)
        if wanted is None:
            return rank_memory.expected(job, None)
        for part, moment in FULL_AT.items():
            found = part_bytes(arm["ranks"], moment, part)
            off[f"{PARTS[part]} of {frames.LABELS[name]}"] = found / wanted[part] - 1
    return rank_memory.expected(job, off or None)


def device(job: Job) -> str:
    """What the device reports after a step, and where more although tensors hold less."""
    return rank_memory.device(job, frames.with_memory(job), frames.WITH, frames.DDP)


def _highest_moment(job: Job) -> str:
    arms = frames.with_memory(job)
    arm = arms.get(frames.OURS, arms[frames.DDP])
    return max(MOMENTS, key=lambda m: int(highest(arm["ranks"], m)["allocated_bytes"]))


def speed(job: Job) -> str:
    """FSDP's step beside what shards less."""
    parts = _beside(job)
    failed = [
        f" {frames.LABELS[name]}: {arm['status']} ({arm['reason']})."
        for name, arm in job.data["arms"].items()
        if arm["status"] != "ok"
    ]
    lost = "".join(failed)
    if not parts:
        return f"{job.who}: FSDP has no time beside another arm.{lost}"
    return f"{job.who}: a step of FSDP {listed(parts)}.{_pace(job)}{lost}"


def _beside(job: Job) -> list[str]:
    """`takes 3.8 times as long as that of ... and 2.6 times as long as that of ...`."""
    other, alike = [], []
    for name, words in frames.WORDS.items():
        interval = frames.against(job, name)
        if interval is None:
            continue
        if interval.low <= 1 <= interval.high:
            alike.append(words)
        else:
            other.append(f"{significant(interval.ratio)} times as long as {words}")
    sorts = {"takes": other, "cannot be told from": alike}
    return [f"{verb} {listed(some)}" for verb, some in sorts.items() if some]


def _pace(job: Job) -> str:
    """Where FSDP is slower than a sharded optimizer with as many bytes: their messages' pace."""
    paces, sent = frames.message_gb_per_s(job), frames.sent_bytes(job)
    interval = frames.against(job, frames.SHARDED)
    if interval is None or interval.low <= 1 or not {frames.SHARDED, frames.OURS} <= set(paces):
        return ""
    if abs(sent[frames.OURS] / sent[frames.SHARDED] - 1) > AS_MANY:
        return ""
    ours, theirs = paces[frames.OURS], paces[frames.SHARDED]
    if ours * (1 + AS_MANY) >= theirs:
        return ""
    more = SCATTERS_SEND_MORE if job.data["ranks"]["backend"] == "gloo" else ""
    return (
        f" With {frames.WITH[frames.SHARDED]} a rank must send about as many bytes, but of "
        f"these all-reduces and broadcasts carry {significant(theirs)} GB/s here while messages "
        f"are under way, gathers and scatters {significant(ours)}{more}."
    )


def messages(job: Job) -> str:
    """In how many messages ours and PyTorch's send, as the profiler saw them."""
    arms = job.data["arms"]
    seen = {
        name: int(arms[name]["trace"]["messages_seen"])
        for name in (frames.OURS, frames.TORCH)
        if "trace" in arms.get(name, {}) and arms[name]["trace"]["seen_as"] is not None
    }
    if len(seen) < 2:
        return f"{job.who}: messages of ours and PyTorch's were not both seen."
    ours, theirs = seen[frames.OURS], seen[frames.TORCH]
    return (
        f"{job.who}: FSDP sends {counted(ours, 'message')} in a step, PyTorch fully_shard "
        f"{theirs:,}."
    )


def overlap(job: Job) -> str:
    """What of the messages is hidden, arm by arm."""
    shares = {
        frames.LABELS[name]: share_range(rank_shares(arm["trace"]))
        for name, arm in job.data["arms"].items()
        if "trace" in arm and arm["trace"]["overlapped_share"] is not None
    }
    if not shares:
        return f"{job.who}: the profiler saw no message, so nothing is said of overlap."
    words = listed(f"{name} {share}" for name, share in shares.items())
    return (
        f"{job.who}: of the time of their messages, arms hide behind computation: {words}. "
        f"{ONE_STEP}{WAITING if job.host_runs_ahead else ''}{_limit(job)}"
    )


WAITING = " A message that waits for its tensors counts as under way, so these are upper bounds."


def _limit(job: Job) -> str:
    """How much of its messages FSDP could hide at most, where that is not all."""
    trace = job.data["arms"].get(frames.OURS, {}).get("trace")
    limit = None if trace is None else hideable(trace)
    if trace is None or limit is None or limit >= 1:
        return ""
    return (
        f" On rank 0 FSDP could hide {percent(limit, 2)} at most: its step computes for "
        f"{significant(trace['compute_ms'])} ms, and messages are under way for "
        f"{significant(trace['communication_ms'])} ms."
    )
