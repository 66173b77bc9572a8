"""Does the sharded optimizer's chapter contradict itself?"""

from __future__ import annotations

from lmlab.writeup.collect import Collected
from lmlab.writeup.frames import sharded_optimizer as frames
from lmlab.writeup.frames.rank_jobs import Job, jobs
from lmlab.writeup.numbers import binary_bytes

TOLERANCE = 0.02


def checks(collected: Collected) -> list[str]:
    """Warnings, job by job."""
    return [warning for job in jobs(collected) for warning in shards_add_up(job)]


def shards_add_up(job: Job) -> list[str]:
    """The shards of all ranks are the state that one rank would hold."""
    arms = frames.memory_arms(job)
    whole = max(frames.state_bytes(arms[frames.PLAIN]))
    return [
        f"{job.who}: the ranks' shares of {frames.LABELS[name]} add up to "
        f"{binary_bytes(total)}, the whole state is {binary_bytes(whole)}."
        for name in (frames.OURS, frames.TORCH)
        if name in arms
        and abs((total := sum(frames.state_bytes(arms[name]))) - whole) > TOLERANCE * whole
    ]
