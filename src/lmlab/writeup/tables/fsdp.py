"""Tables of the FSDP chapter: memory, steps, waits of layers, what must be sent, verdicts."""

from __future__ import annotations

from lmlab.writeup.collect import Collected, sources_of
from lmlab.writeup.frames import fsdp as frames
from lmlab.writeup.frames.moments import FULL_AT, PARTS, part_bytes
from lmlab.writeup.frames.rank_jobs import Job, jobs
from lmlab.writeup.numbers import binary_bytes, hidden_words, percent, significant
from lmlab.writeup.paired import ratio_interval
from lmlab.writeup.table import NOTHING, STATUS_CELLS, Column, Table
from lmlab.writeup.tables.data_parallel import time_cell
from lmlab.writeup.tables.rank_jobs import (
    mib,
    moments,
    rank_peaks,
    sizes_left,
    verdict_row,
    verdicts,
)

LIMIT = 1.10
CLAIM = "FSDP's step is at most 10 % slower than that of PyTorch's fully_shard"


UNKNOWN = " (≤: how much that is, is not known)"


def tables(collected: Collected) -> dict[str, Table]:
    """All tables by name, one of each kind a job."""
    measured = jobs(collected)
    return {
        **{f"memory_{job.key}": memory(job) for job in measured},
        **{f"peaks_{job.key}": table for job in measured if (table := peaks(job)) is not None},
        **{
            f"expected_{job.key}": table for job in measured if (table := expected(job)) is not None
        },
        **{f"steps_{job.key}": steps(job) for job in measured},
        **{f"waits_{job.key}": waits(job) for job in measured if frames.waits(job)},
        **{f"sizes_{job.key}": sizes(job) for job in measured},
        **({"verdict": verdict(collected, measured)} if measured else {}),
    }


def size_of(job: Job) -> str:
    """The size that was taken."""
    return str(job.data["choice"]["size"])


def memory(job: Job) -> Table:
    """Every moment of every arm that ran."""
    return moments(job, frames.with_memory(job), frames.LABELS, size_of(job))


def peaks(job: Job) -> Table | None:
    """The highest points of every arm's first step."""
    return rank_peaks(job, frames.with_memory(job), frames.LABELS, size_of(job))


def expected(job: Job) -> Table | None:
    """Each part when it is there in full, beside the cost model's number, arm by arm."""
    rows = []
    for name, arm in frames.with_memory(job).items():
        wanted = frames.expected_bytes(job, name)
        if wanted is None:
            return None
        cells = [
            f"{mib(part_bytes(arm['ranks'], moment, part))} ({mib(wanted[part])})"
            for part, moment in FULL_AT.items()
        ]
        rows.append([frames.LABELS[name], *cells])
    return Table(
        title=f"Parts of a rank's memory, measured and expected (MiB), {size_of(job)}, {job.who}",
        columns=[Column("Arm", "left"), *(Column(PARTS[part].capitalize()) for part in FULL_AT)],
        rows=rows,
        caption=f"{job.place(size_of(job))} Measured, in brackets what the cost model expects with "
        "what is sharded divided by the number of ranks. Each part at the moment at which it is "
        "there in full; the rank that holds most.",
        sources=sources_of([job.row]),
    )


def steps(job: Job) -> Table:
    """Step times, messages and their overlap, and what a rank must send."""
    times, sent, at_most = frames.samples(job), frames.sent_bytes(job), frames.sends_at_most(job)
    rows = []
    for name, arm in job.data["arms"].items():
        if name not in times:
            rows.append([frames.LABELS[name], STATUS_CELLS[arm["status"]], *[NOTHING] * 5])
            continue
        trace, share = arm["trace"], arm["trace"]["overlapped_share"]
        base = times.get(frames.DDP)
        ratio = None if base is None else ratio_interval(times[name], base)
        rows.append(
            [
                frames.LABELS[name],
                time_cell(times[name]),
                NOTHING if ratio is None else significant(ratio.ratio),
                NOTHING if trace["seen_as"] is None else str(trace["messages_seen"]),
                f"{'≤ ' if name in at_most else ''}{binary_bytes(sent[name])}",
                significant(trace["communication_ms"]),
                NOTHING if share is None else hidden_words(share),
            ]
        )
    return Table(
        title=f"A training step, {size_of(job)}, {job.who}: mean ± deviation (median)",
        columns=[
            Column("Arm", "left"),
            Column("Step, slowest rank (ms)"),
            Column("Over data parallel's"),
            Column("Messages"),
            Column("A rank must send"),
            Column("Messages under way (ms)"),
            Column("Of that behind computation"),
        ],
        rows=rows,
        caption=f"{job.caption(size_of(job))} Data parallel: in buckets of "
        f"{job.result.settings['bucket_mb']:g} MB. Over data parallel's: mean ratio, round by "
        "round. What must be sent is computed for rings, without a second gather of what stays "
        f"between forward and backward{UNKNOWN if at_most & set(times) else ''}; gloo makes a "
        "reduce-scatter of an all-reduce and sends more. Messages and the last two columns are of "
        f"one step under the {job.data['profiler']}, rank 0.",
        sources=sources_of([job.row]),
    )


def waits(job: Job) -> Table:
    """Gathers by phase: in time or waited for."""
    rows = [
        [
            phase.phase,
            str(phase.layers),
            f"{phase.in_time} ({percent(phase.in_time / phase.layers, 2)})",
            significant(phase.total_ms),
            f"{significant(phase.longest_ms)} ({phase.longest_layer})",
        ]
        for phase in frames.waits(job)
    ]
    return Table(
        title=f"Do gathers end before their layer needs them? FSDP, {size_of(job)}, {job.who}",
        columns=[
            Column("Phase", "left"),
            Column("Gathers"),
            Column("In time"),
            Column("Waiting, all on a rank (ms)"),
            Column("Longest wait (ms)"),
        ],
        rows=rows,
        caption=f"{job.place(size_of(job))} {waits_note()}; their sum on the rank that waits "
        f"longest. In time: at most {job.data['waits_below_ms']:g} ms, what asking costs by "
        "itself.",
        sources=sources_of([job.row]),
    )


def waits_note() -> str:
    """What a wait is the median of."""
    return (
        "Median wait of each layer over a few more steps after the rounds, on the rank where it "
        "waits longest"
    )


def sizes(job: Job) -> Table:
    """Which size was taken and why none larger."""
    choice = job.data["choice"]
    return sizes_left(job, [("memory and time", choice["size"], choice["left_out"])])


def verdict(collected: Collected, measured: list[Job]) -> Table:
    """Whether ours keeps up, job by job."""
    rows = [verdict_row(CLAIM, frames.against(job, frames.TORCH), LIMIT, job) for job in measured]
    return verdicts(rows, [job.row for job in measured], collected.device_name)
