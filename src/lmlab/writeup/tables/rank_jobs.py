"""Tables that the chapters of several ranks share: memory at its moments, sizes, verdicts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lmlab.writeup.collect import Row, sources_of
from lmlab.writeup.frames.moments import MOMENTS, PARTS, PHASES, highest, peak_bytes
from lmlab.writeup.frames.rank_jobs import MIB, Job
from lmlab.writeup.numbers import fixed, listed, percent
from lmlab.writeup.paired import CONFIDENCE, RatioInterval, judge
from lmlab.writeup.table import NOTHING, Column, Table


def mib(count: float | None) -> str:
    """Bytes in MiB, to a tenth where that is anything."""
    if count is None:
        return NOTHING
    value = count / MIB
    if count == 0:
        return "0"
    return fixed(value, 0 if abs(value) >= 100 else 1 if abs(value) >= 1 else 2)


def moments(
    job: Job, arms: Mapping[str, Mapping[str, Any]], labels: Mapping[str, str], size: str
) -> Table:
    """What the fullest rank holds, moment by moment and arm by arm."""
    rows = []
    for moment, words in MOMENTS.items():
        for name, arm in arms.items():
            reading = highest(arm["ranks"], moment)
            parts = [mib(reading["parts_bytes"][part]) for part in PARTS]
            totals = [mib(reading[key]) for key in TOTALS]
            rows.append([words, labels[name], *parts, *totals])
    return Table(
        title=f"Memory of a rank at the moments of its first step (MiB), {size}, {job.who}",
        columns=[
            Column("Moment", "left"),
            Column("Arm", "left"),
            *(Column(part.capitalize()) for part in PARTS.values()),
            Column("Allocated"),
            Column("Reserved"),
            Column(device_title(arms)),
        ],
        rows=rows,
        caption=f"{job.place(size)} The rank that holds most. {counting_note(job)}"
        f"{_early_gradients(arms, labels)}",
        sources=sources_of([job.row]),
    )


def _early_gradients(arms: Mapping[str, Mapping[str, Any]], labels: Mapping[str, str]) -> str:
    """Which arms have room for gradients before there are any."""
    early = [
        labels[name]
        for name, arm in arms.items()
        if highest(arm["ranks"], "initialised")["parts_bytes"]["gradients"]
    ]
    return f" Buckets for gradients exist from the start: {listed(early)}." if early else ""


def rank_peaks(
    job: Job, arms: Mapping[str, Mapping[str, Any]], labels: Mapping[str, str], size: str
) -> Table | None:
    """The highest points of the first step, arm by arm; None where the device counts none."""
    peaks = {
        name: [peak_bytes(arm["ranks"], phase) for phase in PHASES] for name, arm in arms.items()
    }
    if all(peak is None for found in peaks.values() for peak in found):
        return None
    return Table(
        title=f"Peaks of a rank's first step (MiB), {size}, {job.who}",
        columns=[Column("Arm", "left"), *(Column(words.capitalize()) for words in PHASES.values())],
        rows=[[labels[name], *map(mib, found)] for name, found in peaks.items()],
        caption=f"{job.place(size)} Most that was allocated at any time; the rank that reached "
        "most.",
        sources=sources_of([job.row]),
    )


TOTALS = ("allocated_bytes", "reserved_bytes", "device_bytes")


def device_title(arms: Mapping[str, Mapping[str, Any]]) -> str:
    """Whose memory the device's own number is."""
    scopes = {
        rank["moments"][moment]["device_scope"]
        for arm in arms.values()
        for rank in arm["ranks"]
        for moment in MOMENTS
    }
    return "Device, all ranks on it" if scopes == {"device"} else "Device, this process"


def counting_note(job: Job) -> str:
    """How bytes were counted, which differs between a GPU and a CPU."""
    if job.data["ranks"]["device"] == "cpu":
        return (
            "A CPU has no counter of tensors: allocated is the sum of the parts, counted storage "
            "by storage, and the device's number is the process's resident memory."
        )
    return (
        "Allocated: living tensors. Reserved: what the allocator keeps. Device: with the CUDA "
        "context and what libraries hold. Parts are counted storage by storage; other is what of "
        "allocated is none of them."
    )


def sizes_left(job: Job, choices: Sequence[tuple[str, str, Sequence[Mapping[str, str]]]]) -> Table:
    """Which size was taken for what, and why larger ones were not."""
    rows = []
    for what, taken, left in choices:
        rows += [[what, one["size"], f"left: {one['reason']}"] for one in left]
        rows.append([what, taken, "taken"])
    return Table(
        title=f"Sizes, {job.who}",
        columns=[Column("For", "left"), Column("Size", "left"), Column("Decision", "left")],
        rows=rows,
        caption=f"{job.who}; {job.work}. Largest first.",
        sources=sources_of([job.row]),
    )


def verdict_row(claim: str, interval: RatioInterval | None, limit: float, job: Job) -> list[str]:
    """A claim with its interval and what became of it."""
    if interval is None:
        return [claim, job.who, NOTHING, NOTHING, NOTHING, "not measured"]
    span = f"{interval.low:.3f} to {interval.high:.3f}"
    rounds, judged = job.rounds(interval.rounds), judge(interval, limit)
    return [claim, job.who, f"{interval.ratio:.3f}", span, rounds, judged]


def verdicts(rows: Sequence[list[str]], used: Sequence[Row], device_name: str) -> Table:
    """Claims of speed, with interval and verdict."""
    return Table(
        title="Speed beside PyTorch's own",
        columns=[
            Column("Claim", "left"),
            Column("Ranks", "left"),
            Column("Ratio of times"),
            Column(f"{percent(CONFIDENCE, 2)} interval"),
            Column("Rounds"),
            Column("Verdict", "left"),
        ],
        rows=rows,
        caption=f"{device_name}. Ratio of the slowest rank's times, ours over PyTorch's, paired by "
        "round: geometric mean and Student's t interval, wide where rounds are few. AMBIGUOUS: the "
        "interval holds both answers. Rounds: taken, of those asked for where the time was up "
        "before.",
        sources=sources_of(used),
    )
