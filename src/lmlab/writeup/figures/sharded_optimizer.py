"""The figure of the sharded optimizer: what a rank holds, moment by moment."""

from __future__ import annotations

from lmlab.writeup.collect import Collected
from lmlab.writeup.figure import Drawing
from lmlab.writeup.figures import rank_jobs
from lmlab.writeup.frames import sharded_optimizer as frames
from lmlab.writeup.frames.rank_jobs import Job, jobs
from lmlab.writeup.tables.sharded_optimizer import memory_size


def figures(collected: Collected) -> dict[str, Drawing]:
    """One figure a job."""
    return {f"memory_{job.key}": _memory(job) for job in jobs(collected)}


def _memory(job: Job) -> Drawing:
    arms = frames.memory_arms(job)
    return Drawing(
        alt=f"Memory of a rank at four moments of a step, by optimizer, {job.who}",
        caption=f"{job.place(memory_size(job))} Allocated bytes of the rank that holds most, by "
        "what they are for.",
        draw=lambda: rank_jobs.moments(arms, frames.LABELS),
    )
