"""Why a sum of many small terms drifts, read off four loops and a trace.

A 16-bit float has eleven binary digits. As the sum grows, its neighbours move apart while the term
stays what it is, and each addition is rounded to that coarser grid. With equal terms the rounding
goes the same way every time until the grid changes, so nothing averages out.
"""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from lmlab.writeup.collect import Collected
from lmlab.writeup.frames import precision as frames
from lmlab.writeup.numbers import signed, significant

# How much the spacing must be of the term before rounding to it matters.
COARSE_FROM = 0.1


def accumulation(collected: Collected) -> str:
    """Which accumulator comes closer."""
    loops = frames.loops(collected)
    if not {"fp32", "fp16"} <= set(loops):
        return "Which accumulator is closer is not known: the loops were not measured."
    wide, narrow = (abs(loops[name]["error"]) for name in ("fp32", "fp16"))
    results = (
        f"The fp32 sum ends at {loops['fp32']['result']:.4f}, off by {significant(wide, 2)}, "
        f"the fp16 sum at {loops['fp16']['result']:.4f}, off by {significant(narrow, 2)}"
    )
    if wide == narrow:
        return f"{results}: neither accumulator is closer."
    better, ratio = ("fp32", narrow / wide if wide else None)
    if narrow < wide:
        better, ratio = ("fp16", wide / narrow if narrow else None)
    times = f", by a factor of {significant(ratio, 2)}" if ratio else ""
    return f"{results}: the {better} accumulator is closer{times}."


def cast(collected: Collected) -> str:
    """Whether casting the term first helps, and what error is left."""
    loops, data = frames.loops(collected), frames.data_of(collected, "accumulation")
    if data is None or not {"fp32_plus_fp16", "fp32_plus_fp16_cast"} <= set(loops):
        return "Whether casting the term up first helps is not known: the loops were not measured."
    plain, first = (loops[name]["result"] for name in ("fp32_plus_fp16", "fp32_plus_fp16_cast"))
    same = (
        "gives the same result" if plain == first else f"gives {first:.4f} instead of {plain:.4f}"
    )
    rounded = data["term_in_fp16"]
    expected = data["terms"] * rounded
    exact = loops["fp32_plus_fp16"]["exact"]
    explained = abs(plain - expected) <= 0.1 * abs(plain - exact)
    rest = (
        f"What is left is the rounding of the term, which fp16 holds as {rounded:.7f}: "
        f"{data['terms']:,} times that is {expected:.4f}."
        if explained
        else f"The rounding of the term alone ({rounded:.7f} in fp16) would give {expected:.4f}, "
        "which is not what came out."
    )
    return f"Casting the fp16 term up before adding it to an fp32 sum {same} ({plain:.4f}). {rest}"


def drift(collected: Collected) -> str:
    """The rounding of the fp16 sum, explained by the spacing of its neighbours."""
    trace, data = frames.trace(collected), frames.data_of(collected, "accumulation")
    if data is None or not len(trace):
        return "Why the fp16 sum drifts is not shown: its trace was not measured."
    term = data["term"]
    last = float(trace["spacing"].iloc[-1])
    if last < COARSE_FROM * term:
        return (
            f"At the end of the sum fp16 numbers are {significant(last, 2)} apart, fine against "
            f"the term {term:g}: spacing does not explain an error here."
        )
    levels = list(dict.fromkeys(trace["spacing"]))[-2:]
    stretches = [trace[trace["spacing"] == level] for level in levels]
    told = "; ".join(_stretch(rows, term) for rows in stretches)
    return (
        "fp16 can only step from one of its numbers to the next, and these lie farther apart as "
        f"the sum grows: {told}. Within a stretch every addition is wrong by the same amount, so "
        f"the error grows with every step. {_course(trace, term, stretches)}"
    )


def _stretch(rows: pd.DataFrame, term: float) -> str:
    """A run of steps over which the spacing stays the same."""
    # Its first addition was still rounded on the finer grid before it.
    added = float(rows["added"].iloc[-1])
    way = "too much" if added > term else "too little" if added < term else "just the term"
    return (
        f"from step {rows['step'].iloc[0]:,} to {rows['step'].iloc[-1]:,} they are "
        f"{significant(rows['spacing'].iloc[0], 3)} apart and each addition adds "
        f"{significant(added, 3)}, {way}"
    )


def _course(trace: pd.DataFrame, term: float, stretches: Sequence[pd.DataFrame]) -> str:
    """Where the error was largest, and whether the last stretches work against each other."""
    error = trace["sum"] - term * trace["step"]
    worst = int(error.abs().argmax())
    end = float(error.iloc[-1])
    peak = (
        f"It is largest at step {trace['step'].iloc[worst]:,}, {signed(float(error.iloc[worst]))}"
    )
    if worst == len(error) - 1:
        return f"{peak}, the end of the sum."
    signs = {float(rows["added"].iloc[-1]) > term for rows in stretches}
    if len(signs) == 2:
        return (
            f"{peak}; the last stretch errs the other way, which leaves {signed(end)} at the end."
        )
    return f"{peak}, and {signed(end)} at the end."
