"""What naive attention costs: where it does not fit and why, how it grows, what compiling gives."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from lmlab.writeup.collect import Collected
from lmlab.writeup.frames import attention as frames
from lmlab.writeup.numbers import binary_bytes, counted, factor, percent, span
from lmlab.writeup.places import extreme
from lmlab.writeup.tables.attention_naive import accounted

SAME_EXPONENT_WITHIN = 0.15


def out_of_memory(collected: Collected, data: pd.DataFrame) -> str:
    """Where naive attention runs out of memory, and why."""
    rows = frames.of(data, topic="naive", arm=frames.NAIVE, pass_="forward")
    if not len(rows):
        return "Naive attention was not asked for."
    full = frames.of(rows, status="oom")
    largest = frames.measured(rows).sort_values(["sequence", "head_dim"])
    if not len(full) and not len(largest):
        return "Where naive attention runs out of memory is not known: no shape was measured."
    why = (
        "because every score is written to memory: a tensor of batch × sequence × sequence, "
        "whatever the head dimension"
    )
    if not len(full):
        last = largest.iloc[-1]
        peak = last["peak_memory_bytes"]
        held = f" and holds {binary_bytes(peak)} at its peak" if peak is not None else ""
        return (
            f"No measured shape runs out of memory: the largest, {_shape(last)}, fits{held}. "
            f"Memory grows with the square of the sequence, {why}."
        )
    first = full.sort_values(["sequence", "head_dim"]).iloc[0]
    before = f"; {_shape(largest.iloc[-1])} still fits" if len(largest) else ""
    return (
        f"Naive attention runs out of memory at {_shape(first)} ({first['reason']}){before}. It "
        f"does so {why}."
    )


def accounted_memory(collected: Collected) -> str:
    """The formula's account of one shape against what was counted."""
    row = accounted(collected)
    if row is None or row.result is None:
        return "No shape was measured, so there is nothing to account for."
    account, arm = row.result.data["account"], row.result.data["arms"].get(frames.NAIVE, {})
    peak = sum(tensor["bytes"] for tensor in account["peak"])
    scores = max(tensor["bytes"] for tensor in account["peak"])
    count = sum(tensor["bytes"] == scores for tensor in account["peak"])
    share = count * scores / peak
    told = (
        f"At the peak {counted(count, 'tensor')} of scores, {binary_bytes(scores)} each, are "
        f"{percent(share)} of the {binary_bytes(peak)} that the formula asks for"
    )
    measured = arm.get("peak_memory_bytes")
    if arm.get("status") == "oom":
        return f"{told}, more than there is."
    if measured is None:
        return f"{told}; nothing counted them here."
    return f"{told}; the allocator counted {binary_bytes(measured)}."


def growth_with_sequence(data: pd.DataFrame) -> str:
    """The power of the sequence by which memory and time grow, fitted over the long shapes."""
    rows = frames.measured(frames.of(data, topic="naive", arm=frames.NAIVE))
    forward = frames.of(rows, pass_="forward")
    saved = frames.exponents(forward[forward["saved_bytes"].notna()], "saved_bytes")
    if not saved:
        return "How naive attention grows with the sequence is not known: too few shapes ran."
    long = frames.long_ones(rows)
    times = [
        power
        for name in frames.PASSES["naive"]
        for power in frames.exponents(frames.of(long, pass_=name), "median_ms")
    ]
    text = (
        f"Memory kept for backward grows with the sequence to the power of {span(saved)} "
        f"({_near_square(saved)})"
    )
    if not times:
        return f"{text}."
    shown = min(long["sequence"])
    return f"{text}; time, from sequence {shown:,} on, to the power of {span(times)}."


def _near_square(exponents: Sequence[float]) -> str:
    square = all(abs(value - 2) <= SAME_EXPONENT_WITHIN for value in exponents)
    return "the square" if square else "not the square"


def growth_with_head_dim(data: pd.DataFrame) -> str:
    """What a wider head costs at the longest sequence."""
    rows = frames.measured(frames.of(data, topic="naive", arm=frames.NAIVE))
    shared = rows.groupby("sequence")["head_dim"].nunique()
    shared = shared[shared > 1]
    if not len(shared):
        return "How naive attention grows with the head dimension is not known: too few ran."
    here = frames.of(rows, sequence=max(shared.index))
    low, high = min(here["head_dim"]), max(here["head_dim"])
    ratios = {
        name: _ratio(frames.of(here, pass_=name), low, high) for name in frames.PASSES["naive"]
    }
    told = " and ".join(f"{name} {factor(ratio)}" for name, ratio in ratios.items())
    verdict = (
        "less than the arithmetic, which grows as the head dimension does"
        if max(ratios.values()) < high / low
        else "as much as the arithmetic"
    )
    return (
        f"At sequence {max(shared.index):,}, head dim {high} against {low}, "
        f"{factor(high / low, 2)} the products, takes {told} the time: {verdict}."
    )


def _ratio(rows: pd.DataFrame, low: int, high: int) -> float:
    times = rows.set_index("head_dim")["median_ms"]
    return float(times[high] / times[low])


def compiled_attention(data: pd.DataFrame) -> str:
    """Where compiling the formula pays."""
    ratios = frames.against(frames.of(data, topic="naive"), frames.COMPILED, frames.NAIVE)
    if not len(ratios):
        return "No shape was measured both eager and compiled."
    faster, slower = (ratios[ratios["verdict"] == word] for word in ("faster", "slower"))
    text = f"Compiled, {len(faster)} of {counted(len(ratios), 'pass', 'passes')} are faster"
    if len(faster):
        best = extreme(faster, "speedup", largest=True)
        text += f", up to {factor(best['speedup'])} ({best['pass']}, {_shape(best)})"
    if len(slower):
        worst = extreme(slower, "speedup", largest=False)
        text += (
            f"; {len(slower)} slower, down to {factor(worst['speedup'])} ({worst['pass']}, "
            f"{_shape(worst)})"
        )
    replaced = [n for n in ratios["attention_replaced_b"] if n]
    note = (
        " In some the compiler put PyTorch's fused attention in place of the formula."
        if replaced
        else ""
    )
    first = [float(value) for value in ratios["first_call_s_b"] if value is not None]
    cost = f" The first pass takes {span(first)} s, compilation included." if first else ""
    return f"{text}.{note}{cost}"


def _shape(row: pd.Series) -> str:
    return f"head dim {row['head_dim']}, sequence {row['sequence']:,}"
