"""Figures of the FSDP chapter: memory, overlap, and how long each block waits for its weights."""

from __future__ import annotations

from collections.abc import Mapping

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lmlab.writeup import style
from lmlab.writeup.collect import Collected
from lmlab.writeup.figure import Drawing
from lmlab.writeup.figures import rank_jobs
from lmlab.writeup.frames import fsdp as frames
from lmlab.writeup.frames.rank_jobs import Job, jobs, sound
from lmlab.writeup.numbers import significant
from lmlab.writeup.tables.fsdp import size_of, waits_note

SHOWN_LABELS = 24
TOO_LOW = 0.03
"""Bars below this share of the longest have their value written above them."""


def figures(collected: Collected) -> dict[str, Drawing]:
    """All figures by name, one of each kind a job."""
    drawings: dict[str, Drawing] = {}
    for job in jobs(collected):
        drawings |= _of_job(job)
    return drawings


def _of_job(job: Job) -> dict[str, Drawing]:
    held, timed = frames.with_memory(job), sound(job.data["arms"])
    return {
        f"memory_{job.key}": Drawing(
            alt=f"Memory of a rank at four moments of a step, by how it is sharded, {job.who}",
            caption=f"{job.place(size_of(job))} Allocated bytes of the rank that holds most, by "
            "what they are for.",
            draw=(lambda: rank_jobs.moments(held, frames.LABELS)) if held else None,
        ),
        f"overlap_{job.key}": Drawing(
            alt=f"Computation and communication of one step, a panel per arm, {job.who}",
            caption=f"One step of each arm on rank 0, from the {job.data['profiler']}, which slows "
            f"the host. {rank_jobs.overlap_note([arm['trace'] for arm in timed.values()])} "
            f"{job.who}; {size_of(job)}, {job.work}.",
            draw=(
                lambda: rank_jobs.overlap(
                    [(frames.LABELS[name], arm["trace"]) for name, arm in timed.items()]
                )
            )
            if timed
            else None,
        ),
        f"waits_{job.key}": Drawing(
            alt=f"How long each block waits for its gathered weights, {job.who}",
            caption=f"{job.place(size_of(job))} Blocks, and matrices that travel alone, in the "
            f"order in which they are used. {waits_note()}.{_kept(job)}",
            draw=(lambda: _waits(job)) if frames.waits(job) else None,
        ),
    }


def _kept(job: Job) -> str:
    """Why backward has a bar fewer."""
    kept = frames.kept_layer(job)
    return "" if kept is None else f" {frames.short(kept)} is not gathered again in backward."


def _waits(job: Job) -> Figure:
    phases = [phase.phase for phase in frames.waits(job)]
    figure, axes = style.panels(len(phases), 1, height=2.0, sharey=True)
    for index, (axis, phase) in enumerate(zip(axes, phases, strict=True)):
        waits = frames.layer_waits(job, phase)
        axis.bar(range(len(waits)), list(waits.values()), color=style.COLOURS[index])
        step = -(-len(waits) // SHOWN_LABELS)
        axis.set_xticks(range(0, len(waits), step), list(waits)[::step], rotation=90, fontsize=6)
        axis.set_xlim(-1, len(waits))
        axis.set_ylabel("Wait (ms)")
        axis.set_title(phase.capitalize())
        axis.grid(axis="x", visible=False)
    longest = max(phase.longest_ms for phase in frames.waits(job))
    for axis, phase in zip(axes, phases, strict=True):
        _mark(axis, frames.layer_waits(job, phase), longest, job.data["waits_below_ms"])
    return figure


def _mark(axis: Axes, waits: Mapping[str, float], longest: float, in_time: float) -> None:
    """What is in time, and the value of bars too low to be seen."""
    axis.axhline(
        in_time, color=style.GUIDE, linestyle="--", linewidth=1,
        label=f"in time: at most {in_time:g} ms",
    )  # fmt: skip
    axis.legend(loc="upper right", bbox_to_anchor=(1.0, 1.18), fontsize=7)
    for place, wait in enumerate(waits.values()):
        if wait < TOO_LOW * longest and len(waits) <= SHOWN_LABELS:
            axis.annotate(significant(wait, 2), (place, wait), xytext=(0, 3), fontsize=6,
                          textcoords="offset points", ha="center")  # fmt: skip
