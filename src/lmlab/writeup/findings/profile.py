"""What the profiles say, sentence by sentence."""

from __future__ import annotations

from collections import Counter

from lmlab.writeup import profile_words as words
from lmlab.writeup.collect import Collected
from lmlab.writeup.findings import (
    profile_attention,
    profile_consistency,
    profile_cores,
    profile_kernels,
    profile_timeline,
)
from lmlab.writeup.frames import profile as frames
from lmlab.writeup.numbers import counted, listed, span
from lmlab.writeup.places import shares


def findings(collected: Collected) -> dict[str, str]:
    """All findings by name."""
    return {
        "summary": summary(collected),
        "recorded": recorded(collected),
        "clock": profile_timeline.clock(collected),
        "elsewhere": profile_timeline.elsewhere(collected),
        "host": profile_timeline.host(collected),
        "slow_ranges": profile_timeline.slow_ranges(collected),
        "consistency": profile_consistency.consistency(collected),
        "top": profile_kernels.top(collected),
        "top_in_other_modes": profile_kernels.top_in_other_modes(collected),
        "others": profile_kernels.others(collected),
        "families": profile_kernels.families(collected),
        "cores": profile_cores.cores(collected),
        "attention": profile_attention.attention(collected),
        "consequence": profile_attention.consequence(collected),
    }


def summary(collected: Collected) -> str:
    """The chapter in two sentences, for the abstract."""
    products = frames.of(frames.families(collected), family=set(words.MATMULS), mode="forward")
    if products.empty:
        return "No profile was recorded."
    totals = products.groupby(frames.PLACE, sort=False)["share"].sum().reset_index()
    device = "the GPU's time" if collected.device == "cuda" else "the operators' time"
    text = f"Matrix products take {shares(totals, 'share')} of {device} in a forward pass"
    ratios = profile_attention.ratios(collected)
    known = ratios[ratios["flops_ratio"].notna()]
    if known.empty:
        return f"{text}."
    return (
        f"{text}; in attention, softmax has {span(known['flops_ratio'], 2)} times the FLOPs of the "
        f"two products and takes {span(known['time_ratio'], 2)} times their time."
    )


def recorded(collected: Collected) -> str:
    """Which profiler made the tables, and why it was not nsys where it was not."""
    points = frames.points(collected)
    ok = frames.of(points, status="ok")
    if ok.empty:
        return "No profile was recorded."
    tools = Counter(ok["tool"])
    each = listed(f"{tool} ({counted(count, 'point')})" for tool, count in tools.items())
    by = next(iter(tools)) if len(tools) == 1 else each
    notes = dict.fromkeys(ok["tool_note"].dropna())
    reason = f" Nsight Systems did not record because {listed(notes)}." if notes else ""
    return f"The recordings are by {by}.{reason}"
