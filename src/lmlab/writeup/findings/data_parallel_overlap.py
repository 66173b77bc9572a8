"""How much of the messages of data parallelism hides behind computation, by the profiler.

Two things stand between such a share and what overlap is worth. A step that computes less than it
sends cannot hide more than it computes. And where a host runs ahead of its GPU, a message counts as
under way while it waits for gradients that are still being computed: variants that send after
backward, and so hide nothing, show how much that is.
"""

from __future__ import annotations

from lmlab.writeup.frames import data_parallel as frames
from lmlab.writeup.frames.data_parallel import Variant
from lmlab.writeup.frames.rank_jobs import Job, hideable
from lmlab.writeup.numbers import listed, percent, significant

NEXT_TO_NOTHING = 0.02


def overlap(job: Job) -> str:
    """What is hidden behind computation, by the profiler's intervals."""
    seen = [variant for variant in frames.talking(job) if variant.hidden is not None]
    if not seen:
        return f"{job.who}: the profiler saw no message, so nothing is said of overlap."
    during = [variant for variant in seen if variant.name.startswith(frames.DURING)]
    after = [v for v in seen if v not in during and v.name != frames.TORCH]
    parts, ahead = [], False
    if after:
        shown = max(map(share, after)) >= NEXT_TO_NOTHING
        ahead = shown and job.host_runs_ahead
        words = (
            f"show {_range(after)}"
            if ahead
            else f"hide at most {percent(max(map(share, after)), 2)}"
        )
        parts.append(
            f"{listed(v.label for v in after)}, which talk after backward, "
            f"{words if shown else 'hide nothing'}"
        )
    if during:
        best = max(during, key=share)
        parts.append(
            f"those that talk during it hide {_range(during)} of the time of their messages "
            f"(most: {best.label})"
        )
    torchs = [variant for variant in seen if variant.name == frames.TORCH]
    parts += [f"{v.label} hides {percent(share(v), 2)}" for v in torchs]
    return f"{job.who}: {'; '.join(parts)}.{AHEAD if ahead else ''}{_limit(seen)}"


AHEAD = (
    " What shows of a message that is sent after backward is waiting, not travel: the host is "
    "ahead of the GPU and hands it over before its gradients are there. The same wait is in the "
    "shares of all others, so these are upper bounds."
)


def _limit(seen: list[Variant]) -> str:
    """How much computing there is to hide behind, where that is less than the messages."""
    best = max(seen, key=share)
    limit = hideable(best.trace)
    if limit is None or limit >= 1:
        return ""
    return (
        f" No variant could hide all: the messages of {best.label} are under way for "
        f"{significant(best.trace['communication_ms'])} ms, and its step computes for "
        f"{significant(best.trace['compute_ms'])} ms, {percent(limit, 2)} of that."
    )


def share(variant: Variant) -> float:
    """What a variant hides, nothing where no message was seen."""
    return variant.hidden or 0.0


def _range(group: list[Variant]) -> str:
    low, high = (percent(find(map(share, group)), 2) for find in (min, max))
    return low if low == high else f"{low} to {high}"
