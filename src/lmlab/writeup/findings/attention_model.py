"""What compiling the whole model gives and costs, and what another attention gives it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd

from lmlab.writeup.collect import Collected
from lmlab.writeup.frames import attention as frames
from lmlab.writeup.frames.attention_steps import KEYS, eager_elsewhere
from lmlab.writeup.numbers import (
    binary_bytes,
    counted,
    every,
    factor,
    factors,
    listed,
    significant,
    span,
)
from lmlab.writeup.places import extreme, named

NAMES = {
    "forward": "forward",
    "forward_backward": "forward with backward",
    "train_step": "a train step",
}
APART = 1.15
"""Times of the same step that differ by more are not one time."""
HARDLY, SHARE_OF_TOKENS = 1.5, 0.5
"""A step that grows less than both, this factor and this share of its tokens, hardly grows."""


def compiled_model(data: pd.DataFrame) -> str:
    """Where compiling the whole model pays, pass by pass."""
    rows = frames.of(data, topic="model_compile")
    ratios = frames.against(rows, frames.COMPILED, frames.EAGER)
    if not len(ratios):
        return f"The whole model was not compiled{_why(rows)}."
    sizes = frames.order(rows, "size")
    told = [_pass(frames.of(ratios, pass_=name), words, sizes) for name, words in NAMES.items()]
    replaced = [n for n in ratios["attention_replaced_b"] if n]
    note = (
        " In some sizes the compiler put PyTorch's fused attention in place of the model's own."
        if replaced
        else ""
    )
    return f"Compiled, {'; '.join(told)}.{_lower_peak(ratios)}{_gone(rows)}{note}"


def _gone(rows: pd.DataFrame) -> str:
    """The sizes that are not measured, by name."""
    gone = frames.order(rows[rows["status"].isin(frames.NOT_THERE)], "size")
    return f" {listed(gone)} {'is' if len(gone) == 1 else 'are'} not measured." if gone else ""


def _lower_peak(ratios: pd.DataFrame) -> str:
    """What compiling does to the peak of a train step."""
    shares = frames.peak_shares(frames.of(ratios, pass_="train_step"))
    return f" Its peak of memory is {factors(shares)} the eager one." if shares else ""


def _elsewhere(collected: Collected, data: pd.DataFrame, ratios: pd.DataFrame) -> str:
    """Eager steps that took another process another time: the speed-up is no better known."""
    both = ratios.merge(eager_elsewhere(collected, data), on=KEYS)
    told = [
        _one_step_in_several_processes(part)
        for _, part in both.groupby(KEYS, sort=False)
        if _is_apart(part)
    ]
    if not told:
        return ""
    return (
        " Speed-ups and numbers of steps are known no better than the eager step, which took "
        f"other processes another time: {'; '.join(told)}."
    )


def _is_apart(part: pd.DataFrame) -> bool:
    ratio = part["median_ms_a"] / part["other_ms"]
    return bool(((ratio > APART) | (ratio < 1 / APART)).any())


def _one_step_in_several_processes(part: pd.DataFrame) -> str:
    """`large 176 ms here (2.12×, 1,200 steps), 120 ms end to end (1.45×, 3,000 steps)`."""
    first = part.iloc[0]
    times = [("here", first["median_ms_a"]), *zip(part["where"], part["other_ms"], strict=True)]
    told = [f"{significant(ms)} ms {where} ({_given(first, ms)})" for where, ms in times]
    return f"{first['size']} {', '.join(told)}"


def _given(row: pd.Series, eager_ms: float) -> str:
    """What compiling would give to an eager step of this time, and when it would have paid."""
    speedup = eager_ms / row["median_ms_b"]
    if speedup <= 1 + frames.LEAST_APART:
        return f"{factor(speedup)}, not made good"
    steps = _made_good_after(row["first_step_s_b"], eager_ms - row["median_ms_b"])
    return f"{factor(speedup)}, {significant(steps, 2)} steps"


def _made_good_after(first_step_s: Any, saved_ms: Any) -> Any:
    """So many steps, of numbers or of columns of them."""
    return first_step_s * 1e3 / saved_ms


def _why(rows: pd.DataFrame) -> str:
    reasons = [str(reason) for reason in frames.order(rows, "reason")]
    return f" ({reasons[0]})" if reasons else ""


def _pass(ratios: pd.DataFrame, words: str, sizes: Sequence[str]) -> str:
    if not len(ratios):
        return f"{words} was not measured both ways"
    faster = ratios[ratios["verdict"] == "faster"]
    slower = ratios[ratios["verdict"] == "slower"]
    worse = f", slower at {_at(slower, sizes)}" if len(slower) else ""
    if not len(faster):
        return f"{words} is faster at no size{worse}"
    everywhere = len(faster) == len(ratios)
    where = "" if everywhere else f" ({named(faster['size'], sizes)})"
    return f"{words} is {factors(faster['speedup'])} as fast{where}{worse}"


def _at(rows: pd.DataFrame, sizes: Sequence[str]) -> str:
    return f"{named(rows['size'], sizes)} ({factors(rows['speedup'])})"


def compiling_cost(collected: Collected, data: pd.DataFrame) -> str:
    """How long compiling takes, and after how many steps it has paid."""
    rows = frames.of(data, topic="model_compile", pass_="train_step")
    ratios = frames.against(rows, frames.COMPILED, frames.EAGER)
    ratios = ratios[ratios["first_step_s_b"].notna()] if len(ratios) else ratios
    if not len(ratios):
        return "What compiling the model costs is not known: no compiled step was measured."
    first = [float(value) for value in ratios["first_step_s_b"]]
    text = f"The first compiled step takes {span(first)} s"
    paying = frames.of(ratios, verdict="faster")
    elsewhere = _elsewhere(collected, data, ratios)
    if not len(paying):
        return f"{text}, which no later step makes good beyond noise.{elsewhere}"
    saved = paying["median_ms_a"] - paying["median_ms_b"]
    steps = _made_good_after(paying["first_step_s_b"].astype(float), saved)
    sizes = named(paying["size"], list(ratios["size"]))
    where = f" ({sizes})" if len(paying) < len(ratios) else ""
    return f"{text}; that is made good after {_steps(steps)}{where}.{elsewhere}"


def _steps(steps: pd.Series) -> str:
    low, high = significant(steps.min(), 2), significant(steps.max(), 2)
    return f"about {low} steps" if low == high else f"about {low} to {high} steps, by size"


def model_attention(data: pd.DataFrame) -> str:
    """Time and memory of a train step with our attention against naive."""
    rows = frames.of(data, topic="model")
    if not len(rows):
        return "The model was not measured with another attention."
    others = [arm for arm in frames.arms_of(rows) if arm != frames.NAIVE]
    return " ".join(_arm(rows, arm) for arm in others) + _pace(rows)


def _arm(rows: pd.DataFrame, arm: str) -> str:
    name = frames.label(arm)
    ratios = frames.against(rows, arm, frames.NAIVE)
    mine = frames.of(rows, arm=arm)
    if not len(frames.measured(mine)):
        return f"With {name} no train step was timed ({mine['reason'].iloc[0] or 'not measured'})."
    alone = _fits_alone(rows, arm)
    if not len(ratios):
        return f"No train step was timed both naive and with {name}.{alone}"
    faster, slower = (ratios[ratios["verdict"] == word] for word in ("faster", "slower"))
    text = f"With {name} a train step is faster beyond noise at {_share(faster, ratios)}"
    if not len(faster) and not len(slower):
        text = f"With {name} a train step takes as long as with naive, within noise, at " + (
            f"{every(len(ratios), 'place')} measured ({factors(ratios['speedup'])} as fast)"
        )
    if len(faster):
        best = extreme(faster, "speedup", largest=True)
        text += f" ({_contexts(faster)}), up to {factor(best['speedup'])} ({_place(best)})"
    if len(slower):
        worst = extreme(slower, "speedup", largest=False)
        text += f", slower at {len(slower)}, down to {factor(worst['speedup'])} ({_place(worst)})"
    gone = frames.not_there(rows, "place")
    return f"{text}.{_memory(ratios)}{alone}{f' {gone}.' if gone else ''}"


def _contexts(rows: pd.DataFrame) -> str:
    """`large at context 128 and 1,024; xl at context 1,024`."""
    return "; ".join(
        f"{size} at context {listed(f'{context:,}' for context in part['context'])}"
        for size, part in rows.groupby("size", sort=False)
    )


def _pace(rows: pd.DataFrame) -> str:
    """Up to which context a step takes hardly longer for many times the tokens, however it attends.

    What sets its time is then not its arithmetic, and no attention can show. By how much a step
    grows is not told: every context is a process of its own, and the pace of two may differ.
    """
    times = frames.measured(rows).pivot(
        index=["size", "arm"], columns="context", values="median_ms"
    )
    if not len(times):
        return ""
    first = times.columns.min()
    growth = times.div(times[first], axis=0).max().cummax()
    flat = [c for c in growth.index if growth[c] < min(HARDLY, c / first * SHARE_OF_TOKENS)]
    if not flat:
        return ""
    last = max(flat)
    return (
        f" From context {first:,} to {last:,}, {last / first:g} times the tokens, steps grow "
        "far less, whatever their attention: something other than arithmetic sets their pace "
        "there, each context in a process of its own, and the attention shows little."
    )


def _memory(ratios: pd.DataFrame) -> str:
    known = ratios[ratios["peak_memory_bytes_a"].notna() & ratios["peak_memory_bytes_b"].notna()]
    if not len(known):
        return ""
    saved = known["peak_memory_bytes_a"].astype(float) - known["peak_memory_bytes_b"].astype(float)
    if saved.max() <= 0:
        return " It saves no memory."
    best = extreme(known.assign(saved=saved), "saved", largest=True)
    return (
        f" The peak falls by up to {binary_bytes(saved.max())}, from "
        f"{binary_bytes(best['peak_memory_bytes_a'])} to "
        f"{binary_bytes(best['peak_memory_bytes_b'])} ({_place(best)})."
    )


def _fits_alone(rows: pd.DataFrame, arm: str) -> str:
    """Steps that only this attention has the memory for."""
    full = frames.of(rows, arm=frames.NAIVE, status="oom")
    mine = frames.measured(frames.of(rows, arm=arm))
    both = full.merge(mine, on=["size", "context"], suffixes=("_a", "_b"))
    if not len(both):
        return ""
    places = [f"{_place(row)} ({significant(row['median_ms_b'])} ms)" for _, row in both.iterrows()]
    return f" Where naive runs out of memory it still runs: {listed(places)}."


def _share(some: pd.DataFrame, every: pd.DataFrame) -> str:
    return f"{len(some)} of {counted(len(every), 'place')}"


def _place(row: pd.Series) -> str:
    return f"{row['size']} at context {row['context']:,}"
