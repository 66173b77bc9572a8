"""Whether FSDP's gathers end before their layers need them, and how late they are.

The block that ends forward begins backward and keeps its weights: it waits for no second gather,
and is not counted as one that came in time.
"""

from __future__ import annotations

from lmlab.writeup.frames import fsdp as frames
from lmlab.writeup.frames.rank_jobs import Job
from lmlab.writeup.numbers import counted, listed, percent, significant

MOSTLY = 0.9
FEW = 3
"""So many are named one by one."""
WHERE = "on the rank where a layer waits longest"


def waits(job: Job) -> str:
    """Whether each gather ends before its layer needs it."""
    phases = frames.waits(job)
    if not phases:
        return f"{job.who}: gathers were not watched."
    longest = max(phases, key=lambda phase: phase.longest_ms)
    waited, step = frames.waited_ms(job), frames.step_ms(job, frames.OURS)
    of_step = "" if not step else f", {percent(waited / step, 2)} of a median step"
    return (
        f"{job.who}: {WHERE}, {_in_time(job, phases)}.{_hardly(job)} All waits of a step on a rank "
        f"together are {significant(waited)} ms{of_step}; the longest is "
        f"{significant(longest.longest_ms)} ms ({longest.longest_layer}, {longest.phase})."
        f"{_kept(job)}"
    )


def _in_time(job: Job, phases: list[frames.Waits]) -> str:
    """`only 1 of 27 gathers ends before its layer needs it`."""
    layers, in_time = (sum(getattr(p, what) for p in phases) for what in ("layers", "in_time"))
    if in_time == 0:
        why = ": the link is slower than the layers" if frames.all_late(job) else ""
        return f"none of {counted(layers, 'gather')} ends before its layer needs it{why}"
    only = "" if in_time / layers >= MOSTLY else "only "
    ends = "ends before its layer needs it" if in_time == 1 else "end before their layer needs them"
    return f"{only}{in_time} of {counted(layers, 'gather')} {ends}"


def _hardly(job: Job) -> str:
    """Which gathers come late, but hardly so."""
    late = frames.hardly_late(job)
    if not late:
        return ""
    named = f" ({listed(late)})" if len(late) <= FEW else ""
    verb = "is" if len(late) == 1 else "are"
    by = significant(max(late.values()), 2)
    return f" {len(late)} {verb} hardly late, by {by} ms at most{named}."


def _kept(job: Job) -> str:
    """The block that needs no second gather."""
    kept = frames.kept_layer(job)
    if kept is None:
        return ""
    return (
        f" The weights of {frames.short(kept)}, which ends forward and begins backward, stay in "
        "between and are gathered once."
    )
