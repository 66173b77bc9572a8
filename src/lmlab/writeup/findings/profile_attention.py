"""Softmax against the two products inside attention: little arithmetic, much memory, much time."""

from __future__ import annotations

import pandas as pd

from lmlab.writeup import profile_words as words
from lmlab.writeup.collect import Collected
from lmlab.writeup.frames import profile as frames
from lmlab.writeup.numbers import counted, percent, significant, span
from lmlab.writeup.places import extreme, place, shares

NO_PARTS = (
    "Attention's parts were not recorded: only an attention that runs operation by operation has "
    "parts to tell apart."
)
PRODUCTS = {"scores", "output"}
# Between one and the other nothing is claimed.
MORE_THAN = 1.1
MOST_OF_ATTENTION = 0.5
WORTH_SAYING = 0.01
# Of the copy rate: from here on moving its bytes takes most of a part's time.
MEMORY_LIMITED_FROM = 0.5


def attention(collected: Collected) -> str:
    """Time beside FLOPs, and at which rates the parts ran."""
    both = ratios(collected)
    if both.empty:
        return NO_PARTS
    time = f"{span(both['time_ratio'])} times their time"
    counted_ = both[both["flops_ratio"].notna()]
    if counted_.empty:
        return (
            f"Against the two products softmax takes {time}; FLOPs are not counted for this model "
            "or precision."
        )
    flops = f"{span(counted_['flops_ratio'])} times their FLOPs"
    parts = frames.parts(collected)
    rate = words.prefix(1e12 * parts["tflops"])
    rates = parts.assign(rate=1e12 * parts["tflops"] / words.PREFIXES[rate])
    softmax = frames.of(rates, part="softmax")["rate"]
    products = frames.of(rates, part=PRODUCTS)["rate"]
    return (
        f"Against the two products softmax has {flops} (5 a score against 4 times the head "
        f"dimension) and takes {time}: "
        f"{_verdict(counted_)} It runs at {span(softmax)} {rate}FLOP/s, the products at "
        f"{span(products)}.{_copies(parts)} {_bandwidth(collected, parts)}"
    )


def ratios(collected: Collected) -> pd.DataFrame:
    """Softmax over the two products, a row a point: time, FLOPs, and the share of non-products."""
    parts = frames.parts(collected)
    rows = []
    for key, here in parts.groupby(frames.PLACE, sort=False):
        products, softmax = frames.of(here, part=PRODUCTS), frames.of(here, part="softmax")
        outside = here[~here["part"].isin(PRODUCTS)]
        time, flops = products["total_ms"].sum(), products["flops"].sum()
        rows.append(
            {
                **dict(zip(frames.PLACE, key, strict=True)),
                "time_ratio": softmax["total_ms"].sum() / time if time else float("nan"),
                "flops_ratio": softmax["flops"].iloc[0] / flops if flops else float("nan"),
                "outside": outside["total_ms"].sum() / max(here["total_ms"].sum(), 1e-12),
            }
        )
    return pd.DataFrame(rows, columns=[*frames.PLACE, "time_ratio", "flops_ratio", "outside"])


def _verdict(both: pd.DataFrame) -> str:
    excess = both["time_ratio"] / both["flops_ratio"]
    if excess.min() > MORE_THAN:
        return f"{span(excess, 2)} times the time that its arithmetic would take at their rate."
    if excess.max() < 1 / MORE_THAN:
        return "less time than its arithmetic would take at their rate."
    if excess.min() >= 1 / MORE_THAN and excess.max() <= MORE_THAN:
        return "about as much time as its arithmetic would take at their rate."
    return "in some points more time than its arithmetic would take at their rate, in others not."


def _copies(parts: pd.DataFrame) -> str:
    """How much of the products' time is not multiplying but bringing operands into shape."""
    rows = frames.of(parts, part=PRODUCTS)
    rows = rows.groupby(frames.PLACE, sort=False)[["product_ms", "total_ms"]].sum()
    rows = rows[rows["product_ms"] > 0]
    share = 1 - rows["product_ms"] / rows["total_ms"]
    if rows.empty or share.max() < WORTH_SAYING:
        return ""
    return f" Of the products' time {span(100 * share, 2)} % goes into copying operands into shape."


def _bandwidth(collected: Collected, parts: pd.DataFrame) -> str:
    """What softmax moves, held against what the machine copies."""
    rows = frames.of(parts, part="softmax")
    rows = rows[rows["gb_per_s"].notna()]
    if rows.empty:
        return "What it moves is not counted."
    best = extreme(rows, "gb_per_s", largest=True)
    moved = f"Its bytes it moves at up to {significant(best['gb_per_s'])} GB/s ({place(best)})"
    copy = collected.ceiling("ceilings", "copy_gb_per_s", "gb_per_s")
    if not copy:
        return f"{moved}; no copy rate was measured to hold it against."
    share = best["gb_per_s"] / copy
    moving = int((rows["gb_per_s"] >= MEMORY_LIMITED_FROM * copy).sum())
    if share > 1:
        return (
            f"{moved}, {percent(share, 2)} of the measured copy rate: part of it stays in a cache."
        )
    if not moving:
        return f"{moved}, {percent(share, 2)} of the measured copy rate: memory is not its limit."
    if moving == len(rows):
        return f"{moved}, {percent(share, 2)} of the measured copy rate: memory is its limit."
    return (
        f"{moved}, {percent(share, 2)} of the measured copy rate, and at "
        f"{percent(MEMORY_LIMITED_FROM, 2)} of it or more in {moving} of "
        f"{counted(len(rows), 'point')}: there memory is its limit."
    )


def consequence(collected: Collected) -> str:
    """What follows for whoever wants attention to be faster."""
    both = ratios(collected)
    if both.empty:
        return ""
    text = (
        f"Scaling, masking and softmax together take {shares(both, 'outside')} of attention's time."
    )
    above = both[both["outside"] > MOST_OF_ATTENTION]
    if above.empty:
        return (
            f"{text} The products take more everywhere, so a faster product helps attention more "
            "than a fused softmax would."
        )
    return (
        f"{text} In {len(above)} of {counted(len(both), 'point')} that is more than the products "
        "take, for hardly any arithmetic: what helps there is not a faster product but moving the "
        "scores less often, as attention in one kernel does."
    )
