"""Which kernels matter, and what becomes of their shares from forward to train step."""

from __future__ import annotations

from collections.abc import Iterable

import pandas as pd

from lmlab.writeup import profile_words as words
from lmlab.writeup.collect import Collected
from lmlab.writeup.frames import profile as frames
from lmlab.writeup.numbers import counted, every, listed, percent, span
from lmlab.writeup.places import extreme, place, shares

NOTHING = "Nothing was recorded, so there is no kernel to name."
# A kernel below this share changes nothing that anybody would notice.
MATTERS_FROM = 0.02
NAMES_LISTED = 4


def top(collected: Collected) -> str:
    """The kernel with the most time in forward: which, where, how much, how often."""
    first = _first(frames.kernels(collected), "forward")
    if first.empty:
        return NOTHING
    counts = first["short_name"].value_counts()  # most points first
    word = "kernel" if collected.device == "cuda" else "operator"
    parts = [_leader(name, frames.of(first, short_name=name), first, word) for name in counts.index]
    return f"In forward the {word} with the most cumulative time is {_shortened(parts)}."


def _leader(name: str, rows: pd.DataFrame, every_: pd.DataFrame, word: str) -> str:
    return (
        f"{name} {_in_points(rows, every_)} ({span(100 * rows['share'])} % of the {word}s' time, "
        f"{_calls(rows)} a pass)"
    )


def _shortened(items: Iterable[str]) -> str:
    """The first few of a list, and how many more there are."""
    listed_ = list(items)
    more = len(listed_) - NAMES_LISTED
    return listed([*listed_[:NAMES_LISTED], *([f"{more} more"] if more > 0 else [])])


def _calls(rows: pd.DataFrame) -> str:
    low, high = int(rows["instances"].min()), int(rows["instances"].max())
    return counted(low, "call") if low == high else f"{low:,} to {high:,} calls"


def _in_points(rows: pd.DataFrame, every_: pd.DataFrame) -> str:
    if len(rows) == len(every_):
        return f"in {every(len(rows), 'point')}"
    return f"in {counted(len(rows), 'point')}"


def top_in_other_modes(collected: Collected) -> str:
    """Whether the same kernel leads once backward and optimizer are there."""
    kernels = frames.kernels(collected)
    first = _first(kernels, "forward")
    if first.empty:
        return "Nothing was recorded of the other modes."
    sentences = []
    for mode in words.MODES[1:]:
        both = first.merge(_first(kernels, mode), on=frames.PLACE, suffixes=("", "_there"))
        same = both[both["name"] == both["name_there"]]
        other = both[both["name"] != both["name_there"]]
        leaders = _shortened(dict.fromkeys(other["short_name_there"]))
        sentences.append(_leads(mode, same, other, leaders, len(both)))
    return " ".join(sentences)


def _leads(mode: str, same: pd.DataFrame, other: pd.DataFrame, leaders: str, whole: int) -> str:
    run = words.RUN_NAMES[mode]
    if other.empty:
        return f"In {run} the same one leads in {every(whole, 'point')}."
    there = f"({span(100 * other['share_there'])} %)"
    if same.empty:
        return f"In {run} another one leads in {every(whole, 'point')}: {leaders} {there}."
    return (
        f"In {run} the same one leads in {len(same)} of {counted(whole, 'point')}, in the others "
        f"{leaders} {there}."
    )


def _first(kernels: pd.DataFrame, mode: str) -> pd.DataFrame:
    """The first row of each point's table in a mode."""
    return frames.of(kernels, mode=mode).groupby(frames.PLACE, sort=False).head(1)


def others(collected: Collected) -> str:
    """What forward spends outside its products, and on what."""
    families_ = frames.of(frames.families(collected), mode="forward")
    if families_.empty:
        return NOTHING
    rest = families_[~families_["family"].isin(words.MATMULS)]
    totals = rest.groupby(frames.PLACE, sort=False)["share"].sum().reset_index()
    if totals.empty:
        return "Forward consists of matrix products alone."
    high = extreme(totals, "share", largest=True)
    text = f"Outside its matrix products forward spends {shares(totals, 'share', 3)} of its time."
    here = frames.of(frames.outside_products(collected), **{key: high[key] for key in frames.PLACE})
    named = here[here["share"] >= MATTERS_FROM].head(NAMES_LISTED)
    if named.empty:
        return f"{text} No single one of what else runs reaches {percent(MATTERS_FROM, 1)}."
    listed_ = listed(
        f"{row['short_name']} ({percent(row['share'], 2)})" for _, row in named.iterrows()
    )
    return f"{text} Of {place(high)} those that matter are {listed_}."


def families(collected: Collected) -> str:
    """How the share of the products changes from forward to train step, and the optimizer's."""
    every_family = frames.families(collected)
    if every_family.empty:
        return "Nothing was recorded, so there are no shares."
    products = frames.of(every_family, family=set(words.MATMULS))
    by_mode = products.groupby([*frames.PLACE, "mode"], sort=False)["share"].sum().unstack("mode")
    change = by_mode["train_step"] - by_mode["forward"]
    ranges = (
        f"{span(100 * by_mode['forward'], 2)} % of forward and "
        f"{span(100 * by_mode['train_step'], 2)} % of the train step"
    )
    direction = {
        (True, False): "in every point less of the train step than of forward",
        (False, True): "in every point more of the train step than of forward",
    }.get(
        (bool((change < 0).all()), bool((change > 0).all())),
        f"less of the train step than of forward in {int((change < 0).sum())} of "
        f"{counted(len(change), 'point')}",
    )
    return f"Matrix products take {ranges}: {direction}. {_optimizer(every_family)}"


def _optimizer(every_family: pd.DataFrame) -> str:
    rows = frames.of(every_family, family="optimizer", mode="train_step")
    if rows.empty:
        return "No kernel of the optimizer was found."
    return (
        f"The optimizer, whose work depends on the parameters and not on the tokens, takes "
        f"{shares(rows, 'share')} of the train step."
    )
