"""What the precision experiments say: why a sum drifts, what autocast keeps, what LayerNorm needs."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from lmlab.writeup.collect import Collected
from lmlab.writeup.findings.layernorm import (
    enough_range_and_digits,
    output_finite,
    variance_digits,
    variance_range,
)
from lmlab.writeup.frames import precision as frames
from lmlab.writeup.numbers import listed, signed, significant

# How much the spacing must be of the term before rounding to it matters.
COARSE_FROM = 0.1


def findings(collected: Collected) -> dict[str, str]:
    """All findings by name."""
    variances = frames.variances(collected)
    return {
        "summary": summary(collected),
        "accumulation": accumulation(collected),
        "cast": cast(collected),
        "drift": drift(collected),
        "autocast": autocast(collected),
        "variance_range": variance_range(variances),
        "variance_digits": variance_digits(variances),
        "bf16_enough": enough_range_and_digits(variances),
        "layernorm_output": output_finite(frames.output_errors(collected)),
    }


def summary(collected: Collected) -> str:
    """The chapter in one sentence, for the abstract."""
    loops = frames.loops(collected)
    if not {"fp32", "fp16"} <= set(loops.index):
        return "The accumulation loops were not measured."
    exact = loops.loc["fp32", "exact"]
    return (
        f"A sum that should be {exact:g} ends at {loops.loc['fp16', 'result']:.4f} in fp16 and at "
        f"{loops.loc['fp32', 'result']:.4f} in fp32."
    )


def accumulation(collected: Collected) -> str:
    """Which accumulator comes closer."""
    loops = frames.loops(collected)
    if not {"fp32", "fp16"} <= set(loops.index):
        return "Which accumulator is closer is not known: the loops were not measured."
    wide, narrow = (abs(float(loops.loc[name, "error"])) for name in ("fp32", "fp16"))
    results = (
        f"The fp32 sum ends at {loops.loc['fp32', 'result']:.4f}, off by {significant(wide, 2)}, "
        f"the fp16 sum at {loops.loc['fp16', 'result']:.4f}, off by {significant(narrow, 2)}"
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
    if data is None or not {"fp32_plus_fp16", "fp32_plus_fp16_cast"} <= set(loops.index):
        return "Whether casting the term up first helps is not known: the loops were not measured."
    plain, first = (
        float(loops.loc[name, "result"]) for name in ("fp32_plus_fp16", "fp32_plus_fp16_cast")
    )
    same = (
        "gives the same result" if plain == first else f"gives {first:.4f} instead of {plain:.4f}"
    )
    rounded = float(data["term_in_fp16"])
    expected = float(data["terms"]) * rounded
    exact = float(loops.loc["fp32_plus_fp16", "exact"])
    explained = abs(plain - expected) <= 0.1 * abs(plain - exact)
    rest = (
        f"What is left is the rounding of the term, which fp16 holds as {rounded:.7f}: "
        f"{data['terms']:,} times that is {expected:.4f}."
        if explained
        else f"The rounding of the term alone ({rounded:.7f} in fp16) would give {expected:.4f}, which is "
        "not what came out."
    )
    return f"Casting the fp16 term up before adding it to an fp32 sum {same} ({plain:.4f}). {rest}"


def drift(collected: Collected) -> str:
    """The rounding of the fp16 sum, explained by the spacing of its neighbours."""
    trace, data = frames.trace(collected), frames.data_of(collected, "accumulation")
    if data is None or not len(trace):
        return "Why the fp16 sum drifts is not shown: its trace was not measured."
    term = float(data["term"])
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
    peak = f"It is largest at step {trace['step'].iloc[worst]:,}, {signed(float(error.iloc[worst]))}"
    if worst == len(error) - 1:
        return f"{peak}, the end of the sum."
    signs = {float(rows["added"].iloc[-1]) > term for rows in stretches}
    if len(signs) == 2:
        return (
            f"{peak}; the last stretch errs the other way, which leaves {signed(end)} at the end."
        )
    return f"{peak}, and {signed(end)} at the end."


def autocast(collected: Collected) -> str:
    """Which parts of the toy model stay in fp32."""
    found = frames.autocast(collected)
    refused = [
        f"autocast to {row.point.parameters['dtype']} is {row.status} ({row.reason or 'no result'})"
        for row in frames.rows_of(collected, "autocast")
        if row.status != "ok"
    ]
    # Types that keep the same parts in fp32 share a sentence.
    alike: dict[tuple[tuple[str, bool], ...], list[str]] = {}
    for dtype, components in found.items():
        wide = tuple((name, frames.BITS[kind] >= 32) for name, kind in components.items())
        alike.setdefault(wide, []).append(dtype)
    told = [_kept(listed(dtypes), dict(wide)) for wide, dtypes in alike.items()]
    if refused:
        told.append(f"Not read: {listed(refused)}.")
    return " ".join(told) or "What autocast keeps in fp32 is not known: it was not measured."


def _kept(dtypes: str, wide: dict[str, bool]) -> str:
    kept = [frames.COMPONENTS.get(name, name) for name, is_wide in wide.items() if is_wide]
    low = [frames.COMPONENTS.get(name, name) for name, is_wide in wide.items() if not is_wide]
    start = f"Under autocast to {dtypes}"
    if not low:
        return f"{start} everything stays in fp32."
    if not kept:
        return f"{start} nothing stays in fp32."
    return f"{start} these stay in fp32: {listed(kept)}; in 16 bit: {listed(low)}."
