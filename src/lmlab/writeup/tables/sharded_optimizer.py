"""Tables of the sharded optimizer: memory, the cost model beside it, times, stage 1 of ZeRO."""

from __future__ import annotations

from lmlab.writeup.collect import Collected, sources_of
from lmlab.writeup.frames import sharded_optimizer as frames
from lmlab.writeup.frames.moments import FULL_AT, PARTS, part_bytes
from lmlab.writeup.frames.rank_jobs import Job, jobs
from lmlab.writeup.numbers import binary_bytes, percent, significant
from lmlab.writeup.table import NOTHING, Column, Table
from lmlab.writeup.tables.data_parallel import time_cell
from lmlab.writeup.tables.rank_jobs import (
    mib,
    moments,
    rank_peaks,
    sizes_left,
    verdict_row,
    verdicts,
)

LIMIT = 1.0
CLAIM = (
    "the sharded optimizer's phase takes no longer than that of PyTorch's ZeroRedundancyOptimizer"
)


def tables(collected: Collected) -> dict[str, Table]:
    """All tables by name, one of each kind a job."""
    measured = jobs(collected)
    return {
        **{f"memory_{job.key}": memory(job) for job in measured},
        **{f"peaks_{job.key}": table for job in measured if (table := peaks(job)) is not None},
        **{f"expected_{job.key}": expected(job) for job in measured if _has_expected(job)},
        **{f"time_{job.key}": times(job) for job in measured},
        **{f"zero_{job.key}": zero(job) for job in measured},
        **{f"sizes_{job.key}": sizes(job) for job in measured},
        **({"verdict": verdict(collected, measured)} if measured else {}),
    }


def memory_size(job: Job) -> str:
    """The size whose memory was read."""
    return str(job.data["memory"]["size"])


def memory(job: Job) -> Table:
    """Every moment of every optimizer."""
    return moments(job, frames.memory_arms(job), frames.LABELS, memory_size(job))


def peaks(job: Job) -> Table | None:
    """The highest points of every optimizer's first step."""
    return rank_peaks(job, frames.memory_arms(job), frames.LABELS, memory_size(job))


def _has_expected(job: Job) -> bool:
    return job.data["memory"]["expected"] is not None


def expected(job: Job) -> Table:
    """Each part when it is there in full, beside the cost model's number."""
    arms, model = frames.memory_arms(job), job.data["memory"]["expected"]
    rows = []
    for part, moment in FULL_AT.items():
        sharded = model[part] / job.world_size if part == "optimizer_state" else model[part]
        rows.append(
            [
                PARTS[part],
                mib(model[part]),
                mib(part_bytes(arms[frames.PLAIN]["ranks"], moment, part)),
                mib(sharded),
                mib(part_bytes(arms[frames.OURS]["ranks"], moment, part)),
            ]
        )
    return Table(
        title=f"What the cost model expects of a rank (MiB), {memory_size(job)}, {job.who}",
        columns=[
            Column("Part", "left"),
            Column("Expected, unsharded"),
            Column("Measured, unsharded"),
            Column("Expected, sharded"),
            Column("Measured, sharded"),
        ],
        rows=rows,
        caption=f"{job.place(memory_size(job))} Each part at the moment at which it is there in "
        "full; optimizer state expected in shards: one over the number of ranks.",
        sources=sources_of([job.row]),
    )


def times(job: Job) -> Table:
    """The optimizer's phase and the whole step."""
    rows = []
    for name, label in frames.LABELS.items():
        optimizer, step = frames.optimizer_ms(job, name), frames.step_ms(job, name)
        others = (frames.against(job, name), frames.steps_against(job, name))
        ratios = others if name != frames.OURS else (None, None)
        rows.append(
            [
                label,
                NOTHING if optimizer is None else time_cell(optimizer),
                NOTHING if step is None else time_cell(step),
                *(NOTHING if ratio is None else significant(ratio.ratio) for ratio in ratios),
            ]
        )
    size = str(job.data["time"]["choice"]["size"])
    return Table(
        title=f"Time of the optimizer, {size}, {job.who}: mean ± deviation (median)",
        columns=[
            Column("Optimizer", "left"),
            Column("Optimizer's phase (ms)"),
            Column("Whole step (ms)"),
            Column("Sharded over this: phase"),
            Column("Step"),
        ],
        rows=rows,
        caption=f"{job.caption(size)} Slowest rank. The phase starts behind a barrier and includes "
        "sending the parameters. The last columns are mean ratios of our phase and our step to "
        "that row's, round by round.",
        sources=sources_of([job.row]),
    )


def zero(job: Job) -> Table:
    """What a rank keeps and sends, beside stage 1 of ZeRO."""
    computed = frames.volumes(job)
    return Table(
        title=f"Beside stage 1 of ZeRO, computed for {memory_size(job)}, {job.who}",
        columns=[
            Column("Optimizer", "left"),
            Column("State on the fullest rank"),
            Column("Sent by a rank in a step"),
        ],
        rows=[
            ["AdamW on every rank", _state(job, 1.0), binary_bytes(computed.plain)],
            ["sharded optimizer", _state(job, computed.state_share), binary_bytes(computed.ours)],
            ["stage 1 of ZeRO", _state(job, computed.even_share), binary_bytes(computed.zero)],
        ],
        caption="Computed, not measured: rings, N ranks, G = P bytes of gradients and parameters. "
        "Every rank: all-reduce 2 (N−1)/N G. Sharded here: the same, and parameters from their "
        "owners, (N−1)/N P. Stage 1: reduce-scatter (N−1)/N G and all-gather (N−1)/N P.",
        sources=sources_of([job.row]),
    )


def _state(job: Job, share: float) -> str:
    """`7.44 GiB (50.00 %)`: AdamW keeps two numbers for each of a parameter."""
    whole = 2 * sum(int(count) for count in job.data["memory"]["owned_bytes"])
    return f"{binary_bytes(share * whole)} ({percent(share, 4)})"


def sizes(job: Job) -> Table:
    """Which sizes were taken, for memory and for time."""
    held, choice = job.data["memory"], job.data["time"]["choice"]
    return sizes_left(
        job,
        [
            ("memory", held["size"], held["left_out"]),
            ("time", choice["size"], choice["left_out"]),
        ],
    )


def verdict(collected: Collected, measured: list[Job]) -> Table:
    """Whether ours keeps up, job by job."""
    rows = [verdict_row(CLAIM, frames.against(job, frames.TORCH), LIMIT, job) for job in measured]
    return verdicts(rows, [job.row for job in measured], collected.device_name)
