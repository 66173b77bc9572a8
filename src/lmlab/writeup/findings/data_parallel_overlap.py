"""How much of the messages of data parallelism hides behind computation, by the profiler.

Two things stand between such a share and what overlap is worth. Gradients exist from backward on,
so that no more of their travel can hide than backward lasts. And where a host runs ahead of its
GPU, a message counts as under way while it waits for gradients that are still being computed:
variants that send after backward, and so hide nothing, show how much that is.
"""

from __future__ import annotations

from lmlab.writeup.findings.rank_jobs import share_range
from lmlab.writeup.frames import data_parallel as frames
from lmlab.writeup.frames.data_parallel import Variant
from lmlab.writeup.frames.rank_jobs import Job, rank_shares
from lmlab.writeup.numbers import listed, percent, significant

NEXT_TO_NOTHING = 0.02


def overlap(job: Job) -> str:
    """What is hidden behind computation, by the profiler's intervals."""
    seen = [variant for variant in frames.talking(job) if variant.hidden is not None]
    if not seen:
        return f"{job.who}: the profiler saw no message, so nothing is said of overlap."
    during = [variant for variant in seen if variant.name.startswith(frames.DURING)]
    after = [v for v in seen if v not in during and v.name != frames.TORCH]
    torchs = [variant for variant in seen if variant.name == frames.TORCH]
    ahead = job.host_runs_ahead and max(map(share, after), default=0.0) >= NEXT_TO_NOTHING
    parts = [
        *([_after(after, ahead)] if after else []),
        *([_during(during)] if during else []),
        *(f"{v.label} hides {share_range(rank_shares(v.trace))}" for v in torchs),
    ]
    return (
        f"{job.who}: {'; '.join(parts)}{_who_hides_more(during, torchs)}. {ONE_STEP}"
        f"{AHEAD if ahead else ''}{_limit(job, seen, ahead)}"
    )


ONE_STEP = "Shares are of one step, ranges over all ranks."
AHEAD = (
    " What shows of a message that is sent after backward is waiting, not travel: the host is "
    "ahead of the GPU and hands it over before its gradients are there. The same wait is in the "
    "shares of all others, so these are upper bounds."
)


def _after(after: list[Variant], ahead: bool) -> str:
    """What variants show that have nothing to hide behind."""
    most = max(max(rank_shares(v.trace)) for v in after)
    words = f"show {_range(after)}" if ahead else f"hide at most {percent(most, 2)}"
    names = listed(v.label for v in after)
    told = words if most >= NEXT_TO_NOTHING else "hide nothing"
    return f"{names}, which talk after backward, {told}"


def _during(during: list[Variant]) -> str:
    """What those hide that talk during backward, and who most, if ranks agree on that."""
    best = {max(during, key=lambda v: rank_shares(v.trace)[r]).label for r in _ranks(during)}
    hidden = _range(during)
    differ = " to " in hidden and len(during) > 1
    most = f" (most: {best.pop()})" if differ and len(best) == 1 else ""
    return f"those that talk during it hide {hidden} of the time of their messages{most}"


def _who_hides_more(during: list[Variant], torchs: list[Variant]) -> str:
    """Whether ranks agree that PyTorch's hides more than the best of ours, or less."""
    if not during or not torchs:
        return ""
    best = max(during, key=share)
    pairs = zip(rank_shares(best.trace), rank_shares(torchs[0].trace), strict=True)
    more = {ours > theirs for ours, theirs in pairs if ours != theirs}
    return f", and ranks do not agree whether {best.label} hides more" if len(more) > 1 else ""


def _limit(job: Job, seen: list[Variant], ahead: bool) -> str:
    """How much backward there is to hide behind, where that is less than the messages."""
    best = max(seen, key=share)
    backward, under_way = frames.backward_ms(job), float(best.trace["communication_ms"])
    if not under_way or backward >= under_way:
        return ""
    beyond = (
        "; what shows beyond that is waiting"
        if ahead and share(best) > backward / under_way
        else ""
    )
    return (
        f" Gradients can hide behind backward alone, which lasts {significant(backward)} ms: "
        f"{percent(backward / under_way, 2)} of the {significant(under_way)} ms for which the "
        f"messages of {best.label} are under way{beyond}."
    )


def share(variant: Variant) -> float:
    """What a variant hides on rank 0, nothing where no message was seen."""
    return variant.hidden or 0.0


def _ranks(group: list[Variant]) -> range:
    return range(min(len(rank_shares(variant.trace)) for variant in group))


def _range(group: list[Variant]) -> str:
    return share_range([one for variant in group for one in rank_shares(variant.trace)])
