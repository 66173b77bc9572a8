"""Where forward and backward take about the same time, and whether the host is the reason.

Backward has twice the arithmetic of forward. Where it takes hardly longer, something else than
arithmetic sets the pace; that it is the host can be shown, because the GPU then stands idle for
part of the phase. Without that share nothing is claimed.
"""

from __future__ import annotations

import pandas as pd

from lmlab.writeup.frames import end_to_end as frames
from lmlab.writeup.frames.repeats import GPU_LIMITED_FROM, HOST_LIMITED_BELOW
from lmlab.writeup.numbers import counted, percent, span
from lmlab.writeup.places import where

ALIKE_UP_TO = 1.25


def host_limit(data: pd.DataFrame, device: str) -> str:
    """Who is the limit where the two passes take about the same."""
    ratios = frames.ratio_of_backward(data)
    if not len(ratios):
        return "Whether the host is the limit is not known: no training step was measured."
    if device == "cpu":
        return (
            "On a CPU the host is the device, so the question whether one waits for the other does "
            f"not apply; backward takes {span(ratios['ratio'])} times as long as forward."
        )
    known = ratios[ratios["busy_share_a"].notna() & ratios["busy_share_b"].notna()]
    if not len(known):
        return (
            "Whether the host or the GPU is the limit is not known: no GPU-busy time was recorded."
        )
    return f"{_alike(known)} {_host_limited(known)} {_gpu_limited(known)}"


def _alike(ratios: pd.DataFrame) -> str:
    alike = ratios[ratios["ratio"] <= ALIKE_UP_TO]
    if not len(alike):
        return (
            "Nowhere do forward and backward take about the same time: backward takes at least "
            f"{span([ratios['ratio'].min()])} times as long."
        )
    return (
        f"Forward and backward take about the same time (backward at most {ALIKE_UP_TO:g} times as "
        f"long) in {len(alike)} of {counted(len(ratios), 'training step')}: "
        f"{_by_precision(alike, ratios)}. {_reasons(alike, ratios)}"
    )


def _reasons(alike: pd.DataFrame, ratios: pd.DataFrame) -> str:
    """Both passes must leave the GPU waiting, or the host explains only one of them."""
    shares = alike[["busy_share_a", "busy_share_b"]]
    idle = alike[shares.max(axis=1) < HOST_LIMITED_BELOW]
    busy = alike[shares.min(axis=1) >= HOST_LIMITED_BELOW]
    partly = alike.drop([*idle.index, *busy.index])
    reasons = [
        (idle, "runs something for only {shares} of the time: the host is the limit, not the GPU"),
        (partly, "waits in one of the two passes (busy for {shares}): the host explains a part"),
        (busy, "is busy for {shares} of both passes: the host is not the reason"),
    ]
    return " ".join(
        f"{_which(rows, alike, ratios)} the GPU {text.format(shares=_shares(rows))}."
        for rows, text in reasons
        if len(rows)
    )


def _which(rows: pd.DataFrame, alike: pd.DataFrame, ratios: pd.DataFrame) -> str:
    if len(alike) == 1:
        return "There"
    if len(rows) == len(alike):
        return "In all of these"
    return f"In {len(rows)} of these, {_by_precision(rows, ratios)},"


def _host_limited(ratios: pd.DataFrame) -> str:
    idle = ratios[ratios[["busy_share_a", "busy_share_b"]].max(axis=1) < HOST_LIMITED_BELOW]
    under = f"under {percent(HOST_LIMITED_BELOW, 2)}"
    if not len(idle):
        return f"No step leaves the GPU busy for {under} of both passes."
    return (
        f"Where the GPU is busy for {under} of both passes ({counted(len(idle), 'step')}) and the "
        f"host sets the pace, backward takes {span(idle['ratio'])} times as long as forward."
    )


def _gpu_limited(ratios: pd.DataFrame) -> str:
    busy = ratios[ratios[["busy_share_a", "busy_share_b"]].min(axis=1) >= GPU_LIMITED_FROM]
    if not len(busy):
        return f"No step keeps the GPU busy for {percent(GPU_LIMITED_FROM, 2)} of both passes."
    return (
        f"Where the GPU is busy for at least {percent(GPU_LIMITED_FROM, 2)} of both passes "
        f"({counted(len(busy), 'step')}), backward takes {span(busy['ratio'])} times as long as "
        "forward."
    )


def _shares(rows: pd.DataFrame) -> str:
    values = pd.concat([rows["busy_share_a"], rows["busy_share_b"]]) * 100
    return f"{span(values, 2)} %"


def _by_precision(rows: pd.DataFrame, every: pd.DataFrame) -> str:
    return ", ".join(
        f"{precision} ({where(here, every)})"
        for precision in frames.order(every, "precision")
        if len(here := frames.of(rows, precision=precision))
    )
