"""What naive attention costs: where it does not fit and why, how it grows, what compiling gives."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from lmlab.writeup.collect import Collected, Row
from lmlab.writeup.frames import attention as frames
from lmlab.writeup.frames.race import wins_from
from lmlab.writeup.numbers import binary_bytes, counted, factor, factors, percent, span
from lmlab.writeup.places import extreme
from lmlab.writeup.tables.attention_account import (
    account_of,
    arm_of,
    largest_with_room,
    smallest_without_room,
)

SAME_EXPONENT_WITHIN = 0.15
HARDLY = 2.0
"""Times of sequences that differ many times in arithmetic and less than this do not follow it."""
EACH_ITS_OWN = "; each shape has a process of its own, and head dims do not compare there"
AS_ACCOUNTED_WITHIN = 0.01
"""Of what the formula asks for; the allocator rounds tensors up."""


def out_of_memory(data: pd.DataFrame) -> str:
    """Where naive attention runs out of memory, and why."""
    rows = frames.of(data, topic="naive", arm=frames.NAIVE, pass_="forward")
    if not len(rows):
        return "Naive attention was not asked for."
    full = frames.of(rows, status="oom")
    ran = frames.measured(rows).sort_values(["sequence", "head_dim"])
    if not len(full) and not len(ran):
        return "Where naive attention runs out of memory is not known: no shape was measured."
    gone = _gone(rows)
    text = _first_that_is_full(full, ran) if len(full) else _all_fit(ran.iloc[-1])
    why = "It runs out because every" if len(full) else "Every"
    return (
        f"{text}{f' ({gone})' if gone else ''}. {why} score is written to memory, a tensor of "
        "batch × sequence × sequence whatever the head dimension: twice the sequence, four times "
        "the scores."
    )


def _gone(rows: pd.DataFrame) -> str:
    """What is not measured, and whether the largest shape is, which may be there to not fit."""
    gone = frames.not_there(rows)
    largest = rows.sort_values(["sequence", "head_dim"]).iloc[-1]
    among = largest["status"] in frames.NOT_THERE
    return f"{gone}, {_shape(largest)} among them" if among else gone


def _all_fit(last: pd.Series) -> str:
    peak = last["peak_memory_bytes"]
    held = f" and holds {binary_bytes(peak)} at its peak" if peak is not None else ""
    return f"No measured shape runs out of memory: the largest, {_shape(last)}, fits{held}"


def _first_that_is_full(full: pd.DataFrame, ran: pd.DataFrame) -> str:
    first = full.sort_values(["sequence", "head_dim"]).iloc[0]
    before = f"; the largest measured below it, {_shape(ran.iloc[-1])}, fits" if len(ran) else ""
    return f"Naive attention runs out of memory at {_shape(first)} ({first['reason']}){before}"


def accounted_memory(collected: Collected) -> str:
    """The formula's account of two shapes, one that does not fit and one that was counted."""
    full, ran = smallest_without_room(collected), largest_with_room(collected)
    told = []
    if full is not None:
        told.append(f"At {_at(full)}, which does not fit, {_squares(full)}{_in_forward(full)}.")
    if ran is not None:
        told.append(
            f"At {_at(ran)}, the largest measured that fits, {_squares(ran)}{_counted(ran)}."
        )
    return " ".join(told) or "No shape was measured, so there is nothing to account for."


def _at(row: Row) -> str:
    return _shape(pd.Series(dict(row.point.parameters)))


def _squares(row: Row) -> str:
    """How much of the peak is scores."""
    peak = account_of(row)["peak"]
    total = sum(tensor["bytes"] for tensor in peak)
    scores = max(tensor["bytes"] for tensor in peak)
    count = sum(tensor["bytes"] == scores for tensor in peak)
    return (
        f"{counted(count, 'tensor')} the size of the scores, {binary_bytes(scores)} each, are "
        f"{percent(count * scores / total)} of the {binary_bytes(total)} that the formula asks for "
        "at the peak"
    )


def _in_forward(row: Row) -> str:
    """What forward alone asks for, before backward is thought of."""
    total = sum(tensor["bytes"] for tensor in account_of(row)["forward"])
    return f", and forward alone for {binary_bytes(total)}"


def _counted(row: Row) -> str:
    measured = arm_of(row).get("peak_memory_bytes")
    if measured is None:
        return "; nothing counted them here"
    peak = [tensor["bytes"] for tensor in account_of(row)["peak"]]
    excess = measured - sum(peak)
    text = (
        f"; the allocator counted {binary_bytes(measured)}, {percent(measured / sum(peak))} of it"
    )
    if abs(excess) <= AS_ACCOUNTED_WITHIN * sum(peak):
        return text
    word = "more" if excess > 0 else "less"
    return f"{text}, {word} by {factor(abs(excess) / max(peak))} such a tensor"


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
    text += f"; time, from sequence {shown:,} on, to the power of {span(times)}"
    return f"{text}.{_below(rows[rows['sequence'] < shown])}"


def _below(short: pd.DataFrame) -> str:
    """Whether short sequences take a time that the arithmetic does not explain."""
    times = short.pivot(index=["head_dim", "pass"], columns="sequence", values="median_ms")
    if len(times.columns) < 2 or not (times.max(axis=1) < HARDLY * times.min(axis=1)).all():
        return ""
    alone = len(set(short["head_dim"])) == 1
    return (
        " Below that it hardly grows: such short passes are set not by arithmetic but by the pace "
        f"of the host, which differs from process to process{'' if alone else EACH_ITS_OWN}."
    )


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
        "less than the arithmetic, since as many scores pass through memory at every head dim"
        if max(ratios.values()) < high / low
        else "no less than the arithmetic"
    )
    return (
        f"At sequence {max(shared.index):,}, head dim {high} against {low}, "
        f"{factor(high / low, 2)} the arithmetic, takes {told} the time: {verdict}."
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
    since = wins_from(ratios)
    if since is not None and since > min(ratios["sequence"]):
        text += f", all from sequence {since:,} on"
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
    gone = frames.not_there(frames.of(data, topic="naive"))
    host = _by_the_gpus_clock(data) if len(slower) else ""
    return f"{text}.{host}{note}{_lower_peak(ratios)}{cost}{f' {gone}.' if gone else ''}"


def _lower_peak(ratios: pd.DataFrame) -> str:
    """What compiling leaves of the peak, where scores and not fixed costs make it up."""
    long = frames.long_ones(frames.of(ratios, pass_="backward"))
    shares = frames.peak_shares(long)
    if not shares:
        return ""
    since = f"from sequence {min(long['sequence']):,} on"
    return f" The peak of memory is {factors(shares)} the eager one {since}."


def _by_the_gpus_clock(data: pd.DataFrame) -> str:
    """What the race says of the same two, whose clock leaves the host out."""
    race = frames.of(data, topic="benchmark", pass_={"forward", "backward"})
    ratios = frames.against(race, frames.COMPILED, frames.NAIVE)
    if not len(ratios) or not (ratios["verdict"] == "faster").all():
        return ""
    return (
        f" Then it is the host that is slower: in the race below (causal, batch "
        f"{ratios['batch'].iloc[0]}), whose clock leaves the host out, compiled naive is faster in "
        f"all {len(ratios):,} comparisons ({span(ratios['speedup'])} times as fast)."
    )


def _shape(row: pd.Series) -> str:
    return f"head dim {row['head_dim']}, sequence {row['sequence']:,}"
