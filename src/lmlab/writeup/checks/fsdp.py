"""Does the FSDP chapter contradict itself?"""

from __future__ import annotations

from lmlab.writeup.collect import Collected
from lmlab.writeup.frames import fsdp as frames
from lmlab.writeup.frames.moments import part_bytes
from lmlab.writeup.frames.rank_jobs import Job, jobs
from lmlab.writeup.numbers import binary_bytes

TOLERANCE = 0.05


def checks(collected: Collected) -> list[str]:
    """Warnings, job by job."""
    return [warning for job in jobs(collected) for warning in keeps_its_share(job)]


def keeps_its_share(job: Job) -> list[str]:
    """Between steps a rank keeps what is replicated and its share of what is not."""
    arms = frames.with_memory(job)
    if not {frames.DDP, frames.OURS} <= set(arms):
        return []
    whole = part_bytes(arms[frames.DDP]["ranks"], "after_step", "parameters")
    cut = int(job.data["sharded_bytes"])
    expected = whole - cut + cut / job.world_size
    found = part_bytes(arms[frames.OURS]["ranks"], "after_step", "parameters")
    if abs(found - expected) <= TOLERANCE * expected:
        return []
    return [
        f"{job.who}: FSDP keeps {binary_bytes(found)} of parameters on a rank, "
        f"{binary_bytes(expected)} would be its share."
    ]
