"""Figures of the FSDP chapter: memory, overlap, and how long each block waits for its weights."""

from __future__ import annotations

from matplotlib.figure import Figure

from lmlab.writeup import style
from lmlab.writeup.collect import Collected
from lmlab.writeup.figure import Drawing
from lmlab.writeup.figures import rank_jobs
from lmlab.writeup.frames import fsdp as frames
from lmlab.writeup.frames.rank_jobs import Job, jobs, sound
from lmlab.writeup.tables.fsdp import size_of

SHOWN_LABELS = 24


def figures(collected: Collected) -> dict[str, Drawing]:
    """All figures by name, one of each kind a job."""
    drawings: dict[str, Drawing] = {}
    for job in jobs(collected):
        drawings |= _of_job(job)
    return drawings


def _of_job(job: Job) -> dict[str, Drawing]:
    held, timed = frames.with_memory(job), sound(job.data["arms"])
    caption = job.caption(size_of(job))
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
            caption=f"{caption} Blocks, and matrices that travel alone, in the order in which they "
            "are used; median over a few steps on the rank where each waits longest.",
            draw=(lambda: _waits(job)) if frames.waits(job) else None,
        ),
    }


def _waits(job: Job) -> Figure:
    phases = [phase.phase for phase in frames.waits(job)]
    figure, axes = style.panels(len(phases), 1, height=2.0, sharey=True)
    for index, (axis, phase) in enumerate(zip(axes, phases, strict=True)):
        waits = frames.layer_waits(job, phase)
        axis.bar(range(len(waits)), list(waits.values()), color=style.COLOURS[index])
        axis.axhline(job.data["waits_below_ms"], color=style.GUIDE, linestyle="--", linewidth=1)
        step = -(-len(waits) // SHOWN_LABELS)
        places = range(0, len(waits), step)
        names = [_short(layer) for layer in list(waits)[::step]]
        axis.set_xticks(places, names, rotation=90, fontsize=6)
        axis.set_xlim(-1, len(waits))
        axis.set_ylabel("Wait (ms)")
        axis.set_title(phase.capitalize())
        axis.grid(axis="x", visible=False)
    return figure


def _short(layer: str) -> str:
    """The name of a block, or of the layer whose matrix travels alone."""
    return layer.removesuffix(".weight")
