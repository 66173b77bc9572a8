"""Tables of the data-parallel chapter: steps, ranks, the bucket sweep with its model, verdicts."""

from __future__ import annotations

import statistics

from lmlab.writeup.collect import Collected, sources_of
from lmlab.writeup.frames import data_parallel as frames
from lmlab.writeup.frames.data_parallel import Variant
from lmlab.writeup.frames.rank_jobs import MIB, Job, jobs
from lmlab.writeup.numbers import (
    binary_bytes,
    fixed,
    hidden_words,
    mean_and_deviation,
    percent,
    significant,
)
from lmlab.writeup.numbers import shared_decimals as decimals
from lmlab.writeup.references import published_steps
from lmlab.writeup.table import NOTHING, STATUS_CELLS, Column, Table
from lmlab.writeup.tables.rank_jobs import sizes_left, verdict_row, verdicts

LIMIT = 1.05
CLAIM = "a bucketed step is at most 5 % slower than that of PyTorch's DistributedDataParallel"


def tables(collected: Collected) -> dict[str, Table]:
    """All tables by name, one of each kind a job."""
    measured = jobs(collected)
    return {
        **{f"steps_{job.key}": steps(job) for job in measured},
        **{f"ranks_{job.key}": ranks(job) for job in measured},
        **{f"sizes_{job.key}": sizes(job) for job in measured},
        **{f"model_{job.key}": model(job) for job in measured if frames.overhead_fit(job)},
        **({"verdict": verdict(collected, measured)} if measured else {}),
        **published(collected, measured),
    }


def size_of(job: Job) -> str:
    """The size that was taken."""
    return str(job.data["choice"]["size"])


def time_cell(samples: list[float]) -> str:
    """`12.35 ± 0.12 (12.33)`."""
    mean, median = statistics.fmean(samples), statistics.median(samples)
    sd = statistics.stdev(samples) if len(samples) > 1 else None
    places = max(decimals(mean, sd), decimals(median, None))
    return f"{mean_and_deviation(mean, sd)} ({fixed(median, places)})"


def steps(job: Job) -> Table:
    """A row a variant: its step, what it adds, and how much of its messages is hidden."""
    rows = [_step(variant) for variant in frames.variants(job)]
    failed = [
        [frames.label(name, job), STATUS_CELLS[arm["status"]], *[NOTHING] * 4]
        for name, arm in job.data["arms"].items()
        if arm["status"] != "ok"
    ]
    return Table(
        title=f"A training step by variant, {size_of(job)}, {job.who}: mean ± deviation (median)",
        columns=[
            Column("Variant", "left"),
            Column("Step, slowest rank (ms)"),
            Column("Above a silent step (ms)"),
            Column("Messages"),
            Column("Messages under way (ms)"),
            Column("Of that behind computation"),
        ],
        rows=[*rows, *failed],
        caption=f"{job.caption(size_of(job))} Above a silent step: median over rounds of the "
        f"difference within a round. A bucket of 1 MB holds 2²⁰ bytes, and at least one tensor. "
        f"The last two columns are of one step under the {job.data['profiler']}, rank 0; "
        "a message is under way from when it is handed over until its result is there.",
        sources=sources_of([job.row]),
    )


def _step(variant: Variant) -> list[str]:
    messages, trace = variant.entry["messages"], variant.trace
    seen = trace["seen_as"] is not None
    return [
        variant.label,
        time_cell(variant.samples_ms),
        NOTHING if variant.added_ms is None else significant(variant.added_ms),
        NOTHING if not messages and not seen else str(messages or trace["messages_seen"]),
        significant(trace["communication_ms"]) if seen else NOTHING,
        NOTHING if variant.hidden is None else hidden_words(variant.hidden),
    ]


def ranks(job: Job) -> Table:
    """Medians of every rank, the slowest, and how far ranks are apart."""
    columns = [Column(f"Rank {rank} (ms)") for rank in range(job.world_size)]
    rows = [
        [
            variant.label,
            *(significant(median) for median in variant.rank_medians_ms),
            significant(variant.median_ms),
            significant(variant.skew_ms, 2),
            percent(variant.skew_ms / variant.median_ms, 2),
        ]
        for variant in frames.variants(job)
    ]
    return Table(
        title=f"Ranks of a step, {size_of(job)}, {job.who}: median times",
        columns=[
            Column("Variant", "left"),
            *columns,
            Column("Slowest rank (ms)"),
            Column("Skew (ms)"),
            Column("Of the step"),
        ],
        rows=rows,
        caption=f"{job.caption(size_of(job))} Skew: median over rounds of how far apart the first "
        "and the last rank finish; all start behind a barrier.",
        sources=sources_of([job.row]),
    )


def sizes(job: Job) -> Table:
    """Which size was taken and why none larger."""
    choice = job.data["choice"]
    return sizes_left(job, [("time", choice["size"], choice["left_out"])])


def model(job: Job) -> Table:
    """The sweep over buckets beside what the fitted model says."""
    fitted = frames.overhead_fit(job)
    assert fitted is not None
    h = statistics.median(job.data["phases_ms"]["backward"])
    rows = [
        [
            frames.label(sent.name, job),
            str(sent.messages),
            significant(sent.total_bytes / sent.messages / MIB),
            significant(sent.added_ms),
            significant(fitted.of(sent)),
        ]
        for sent in frames.sent(job)
    ]
    return Table(
        title=f"What communication adds to a step, measured and modelled, {job.who}",
        columns=[
            Column("Variant", "left"),
            Column("Messages"),
            Column("Mean message (MiB)"),
            Column("Measured (ms)"),
            Column("Model (ms)"),
        ],
        rows=rows,
        caption=f"{job.caption(size_of(job))} Model: max(S/B + n c − h (1 − 1/n), S/(n B) + c), h "
        f"zero for variants that wait for backward; measured h = {significant(h)} ms, "
        f"S = {binary_bytes(job.data['gradient_bytes'])}; fitted B = {fitted.gb_per_s:.3g} GB/s, "
        f"c = {fitted.call_ms:.3g} ms.",
        sources=sources_of([job.row]),
    )


def verdict(collected: Collected, measured: list[Job]) -> Table:
    """Whether ours keeps up, job by job."""
    rows = []
    for job in measured:
        compared = frames.against_torch(job)
        rows.append(verdict_row(CLAIM, compared[2] if compared else None, LIMIT, job))
    return verdicts(rows, [job.row for job in measured], collected.device_name)


def published(collected: Collected, measured: list[Job]) -> dict[str, Table]:
    """Steps of the same variants on other GPUs; a scale, not a contest."""
    theirs = published_steps(collected.references, "ddp")
    if collected.device != "cuda" or not len(theirs):
        return {}
    rows = [
        [
            str(row["gpu"]),
            str(row["size"]),
            " ".join(filter(None, [str(row["variant"]), str(row["parameter"])])),
            f"{1e3 * float(row['value']):,.0f}",
        ]
        for _, row in theirs.iterrows()
    ]
    table = Table(
        title="Published: a data-parallel step of two ranks on other GPUs, slowest rank",
        columns=[
            Column("GPU", "left"),
            Column("Size", "left"),
            Column("Variant", "left"),
            Column("Step (ms)"),
        ],
        rows=rows,
        caption="Publication 002, as its author states it: a GPU each. Batch, context and backend "
        "are not stated.",
        sources=["report/references/distributed.csv"],
    )
    return {"published": table}
