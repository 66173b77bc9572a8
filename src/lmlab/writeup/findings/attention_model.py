"""What compiling the whole model gives and costs, and what another attention gives it."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from lmlab.writeup.frames import attention as frames
from lmlab.writeup.numbers import binary_bytes, counted, every, factor, listed, significant, span
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
    gone = frames.not_there(rows, "size")
    return f"Compiled, {'; '.join(told)}.{f' {gone}.' if gone else ''}{note}{_elsewhere(data)}"


def _elsewhere(data: pd.DataFrame) -> str:
    """Eager steps that took another process another time: the speed-up is no better known."""
    here = frames.of(data, topic="model_compile", arm=frames.EAGER, pass_="train_step")
    there = frames.of(data, topic="model", arm=frames.NAIVE, pass_="train_step")
    keys = ["size", "context", "precision", "batch"]
    both = frames.measured(here).merge(frames.measured(there), on=keys, suffixes=("_a", "_b"))
    ratio = both["median_ms_a"] / both["median_ms_b"]
    told = [
        f"{row['size']} {significant(row['median_ms_a'])} and {significant(row['median_ms_b'])} ms"
        for _, row in both[(ratio > APART) | (ratio < 1 / APART)].iterrows()
    ]
    if not told:
        return ""
    return (
        f" The same eager step took another time in the process of another comparison of this "
        f"chapter ({listed(told)}), so the speed-up there is known no better."
    )


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
    where = named(faster["size"], sizes)
    return f"{words} is {_span(faster['speedup'])} as fast ({where}){worse}"


def _at(rows: pd.DataFrame, sizes: Sequence[str]) -> str:
    return f"{named(rows['size'], sizes)} ({_span(rows['speedup'])})"


def _span(ratios: pd.Series) -> str:
    low, high = factor(ratios.min()), factor(ratios.max())
    return low if low == high else f"{low} to {high}"


def compiling_cost(data: pd.DataFrame) -> str:
    """How long compiling takes, and after how many steps it has paid."""
    rows = frames.of(data, topic="model_compile", pass_="train_step")
    ratios = frames.against(rows, frames.COMPILED, frames.EAGER)
    ratios = ratios[ratios["first_step_s_b"].notna()] if len(ratios) else ratios
    if not len(ratios):
        return "What compiling the model costs is not known: no compiled step was measured."
    first = [float(value) for value in ratios["first_step_s_b"]]
    text = f"The first compiled step takes {span(first)} s"
    paying = frames.of(ratios, verdict="faster")
    if not len(paying):
        return f"{text}, which no later step makes good beyond noise."
    saved = paying["median_ms_a"] - paying["median_ms_b"]
    steps = paying["first_step_s_b"].astype(float) * 1e3 / saved
    sizes = named(paying["size"], list(ratios["size"]))
    where = f" ({sizes})" if len(paying) < len(ratios) else ""
    return f"{text}; that is made good after {_steps(steps)}{where}."


def _steps(steps: pd.Series) -> str:
    low, high = significant(steps.min(), 2), significant(steps.max(), 2)
    return f"about {low} steps" if low == high else f"about {low} to {high} steps, by size"


def model_attention(data: pd.DataFrame) -> str:
    """Time and memory of a train step with our attention against naive."""
    rows = frames.of(data, topic="model")
    if not len(rows):
        return "The model was not measured with another attention."
    others = [arm for arm in frames.arms_of(rows) if arm != frames.NAIVE]
    return " ".join(_arm(rows, arm) for arm in others)


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
            f"{every(len(ratios), 'place')} measured ({_span(ratios['speedup'])} as fast)"
        )
    if len(faster):
        best = extreme(faster, "speedup", largest=True)
        text += f", up to {factor(best['speedup'])} ({_place(best)})"
    if len(slower):
        worst = extreme(slower, "speedup", largest=False)
        text += f", slower at {len(slower)}, down to {factor(worst['speedup'])} ({_place(worst)})"
    gone = frames.not_there(rows, "place")
    told = f"{text}.{_pace(rows)}{_memory(ratios)}{alone}"
    return f"{told}{f' {gone}.' if gone else ''}"


def _pace(rows: pd.DataFrame) -> str:
    """Up to which context a step takes hardly longer for many times the tokens, however it attends.

    What sets its time is then not its arithmetic, and no attention can show.
    """
    times = frames.measured(rows).pivot(
        index=["size", "arm"], columns="context", values="median_ms"
    )
    first = times.columns.min()
    growth = times.div(times[first], axis=0).max()
    flat = [c for c in growth.index if growth[c] < min(HARDLY, c / first * SHARE_OF_TOKENS)]
    if not flat:
        return ""
    last = max(flat)
    return (
        f" Up to context {last} a step takes at most {factor(growth[last])} as long as at {first}, "
        f"with either attention, for {last / first:g} times the tokens: something other than "
        "arithmetic sets its pace there and hides the attention."
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
    return f"{row['size']} at context {row['context']}"
