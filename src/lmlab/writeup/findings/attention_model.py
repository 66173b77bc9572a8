"""What compiling the whole model gives and costs, and what another attention gives it."""

from __future__ import annotations

import pandas as pd

from lmlab.writeup.frames import attention as frames
from lmlab.writeup.numbers import binary_bytes, counted, every, factor, listed, significant, span
from lmlab.writeup.places import extreme, named

NAMES = {
    "forward": "forward",
    "forward_backward": "forward with backward",
    "train_step": "a train step",
}
FLAT_BELOW = 0.5
"""Of the growth of the tokens: a step that grows less is not set by them."""


def compiled_model(data: pd.DataFrame) -> str:
    """Where compiling the whole model pays, pass by pass."""
    rows = frames.of(data, topic="model_compile")
    ratios = frames.against(rows, frames.COMPILED, frames.EAGER)
    if not len(ratios):
        return f"The whole model was not compiled{_why(rows)}."
    told = [_pass(frames.of(ratios, pass_=name), words) for name, words in NAMES.items()]
    replaced = [n for n in ratios["attention_replaced_b"] if n]
    note = (
        " In some sizes the compiler put PyTorch's fused attention in place of the model's own."
        if replaced
        else ""
    )
    gone = frames.not_there(rows, "size")
    return f"Compiled, {'; '.join(told)}.{f' {gone}.' if gone else ''}{note}"


def _why(rows: pd.DataFrame) -> str:
    reasons = [str(reason) for reason in frames.order(rows, "reason")]
    return f" ({reasons[0]})" if reasons else ""


def _pass(ratios: pd.DataFrame, words: str) -> str:
    if not len(ratios):
        return f"{words} was not measured both ways"
    faster = ratios[ratios["verdict"] == "faster"]
    slower = ratios[ratios["verdict"] == "slower"]
    worse = f", slower at {_at(slower, ratios)}" if len(slower) else ""
    if not len(faster):
        return f"{words} is faster at no size{worse}"
    where = named(faster["size"], list(ratios["size"]))
    return f"{words} is {_span(faster['speedup'])} as fast ({where}){worse}"


def _at(rows: pd.DataFrame, every: pd.DataFrame) -> str:
    return f"{named(rows['size'], list(every['size']))} ({_span(rows['speedup'])})"


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
    low, high = f"{steps.min():,.0f}", f"{steps.max():,.0f}"
    return f"{low} steps" if low == high else f"{low} to {high} steps, by size"


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
    told = f"{text}.{_pace(mine)}{_memory(ratios)}{alone}"
    return f"{told}{f' {gone}.' if gone else ''}"


def _pace(mine: pd.DataFrame) -> str:
    """Sizes whose step takes hardly longer for many times the tokens: attention is not why."""
    timed = frames.measured(mine)
    first, last = (timed[timed["context"] == end] for end in _ends(timed))
    both = first.merge(last, on="size", suffixes=("_a", "_b"))
    both["growth"] = both["median_ms_b"] / both["median_ms_a"]
    tokens = both["context_b"] / both["context_a"]
    flat = both[both["growth"] < FLAT_BELOW * tokens]
    if not len(flat):
        return ""
    where = named(flat["size"], list(both["size"]))
    return (
        f" From context {flat['context_a'].iloc[0]} to {flat['context_b'].iloc[0]},"
        f" {tokens.iloc[0]:g} times the tokens, such a step takes {span(flat['growth'])} times as"
        f" long ({where}): something other than its arithmetic sets the pace, and hides what a"
        " faster attention gives."
    )


def _ends(timed: pd.DataFrame) -> tuple[int, int]:
    return timed["context"].min(), timed["context"].max()


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
