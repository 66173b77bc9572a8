"""Whether the numbers of the recordings fit each other."""

from __future__ import annotations

import pandas as pd

from lmlab.writeup.collect import Collected
from lmlab.writeup.frames.profile_consistency import (
    ADDS_UP_WITHIN,
    BACKWARD_AT_LEAST,
    BACKWARD_AT_MOST,
    added_up,
    backward_ratios,
    tables_compared,
)
from lmlab.writeup.numbers import counted, every, percent, span


def consistency(collected: Collected) -> str:
    """Three checks with what they found."""
    runs = added_up(collected)
    if runs.empty:
        return "Nothing was recorded, so nothing can contradict itself."
    sentences = [
        _sums(runs),
        _ratios(backward_ratios(collected), collected.device),
        _tables(tables_compared(collected)),
    ]
    return " ".join(sentence for sentence in sentences if sentence)


def _sums(runs: pd.DataFrame) -> str:
    device = f"the device's time within {percent(ADDS_UP_WITHIN, 1)}"
    fitting = int(runs["adds_up"].sum())
    if fitting == len(runs):
        return f"In {every(len(runs), 'run')} the kernels of the phases add up to {device}."
    return (
        f"The kernels of the phases add up to {device} in {fitting} of "
        f"{counted(len(runs), 'run')} only."
    )


def _ratios(ratios: pd.DataFrame, device: str) -> str:
    if ratios.empty:
        return ""
    found = f"Kernels of backward take {span(ratios['ratio'])} times as long as those of forward"
    if device != "cuda":
        return f"{found}."
    expected = f"{BACKWARD_AT_LEAST:g} to {BACKWARD_AT_MOST:g}"
    inside = ratios["ratio"].between(BACKWARD_AT_LEAST, BACKWARD_AT_MOST)
    if inside.all():
        return f"{found}; {expected} times is what twice the arithmetic lets one expect."
    return (
        f"{found}, for {counted(int((~inside).sum()), 'point')} outside the {expected} times that "
        "twice the arithmetic lets one expect."
    )


def _tables(compared: pd.DataFrame) -> str:
    differ = int(compared["differ"].sum())
    what = "the kernel table of forward differs from that of forward and backward"
    if differ == len(compared):
        return f"In {every(len(compared), 'point')} {what}: each run has its own."
    return f"In {differ} of {counted(len(compared), 'point')} only {what}."
