"""Which kernels matter, what becomes of their shares from forward to train step, on which cores.

That products run on SIMT cores is no mystery and no accident: tensor cores multiply 16-bit numbers
and TF32, so fp32 with TF32 off cannot use them. In the other precisions a product falls back when
its operands are not aligned to 16 bytes; then some side of it is no multiple of 8 (of 4 in TF32).
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import pandas as pd

from lmlab.writeup.collect import Collected
from lmlab.writeup.frames import profile as frames
from lmlab.writeup.numbers import counted, every, listed, percent, span
from lmlab.writeup.places import extreme, place, shares

NOTHING = "Nothing was recorded, so there is no kernel to name."
# A kernel below this share changes nothing that anybody would notice.
MATTERS_FROM = 0.02
NAMES_LISTED = 4
ALL_OF_IT = 0.999
ALIGNED_TO = {"bf16": 8, "fp16": 8, "tf32": 4}
_ALIGNMENT = re.compile(r"align[abc]?(\d+)")
SIDES = ("d_model", "d_ff", "vocab_size", "context")


def top(collected: Collected) -> str:
    """The kernel with the most time in forward: which, where, how much, how often."""
    first = _first(frames.kernels(collected), "forward")
    if first.empty:
        return NOTHING
    counts = first["short_name"].value_counts()  # most points first
    parts = [_leader(name, frames.of(first, short_name=name), first) for name in counts.index]
    word = "kernel" if collected.device == "cuda" else "operator"
    return f"In forward the {word} with the most cumulative time is {_shortened(parts)}."


def _leader(name: str, rows: pd.DataFrame, every_: pd.DataFrame) -> str:
    return (
        f"{name} {_in_points(rows, every_)} ({span(100 * rows['share'])} % of forward, "
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
    for mode in frames.MODES[1:]:
        both = first.merge(_first(kernels, mode), on=frames.PLACE, suffixes=("", "_there"))
        same = both[both["name"] == both["name_there"]]
        other = both[both["name"] != both["name_there"]]
        leaders = _shortened(dict.fromkeys(other["short_name_there"]))
        sentences.append(_leads(mode, same, other, leaders, len(both)))
    return " ".join(sentences)


def _leads(mode: str, same: pd.DataFrame, other: pd.DataFrame, leaders: str, whole: int) -> str:
    run = frames.RUN_NAMES[mode]
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
    """What forward spends outside its products, and on which kernels."""
    kernels = frames.of(frames.kernels(collected), mode="forward")
    if kernels.empty:
        return NOTHING
    rest = kernels[~kernels["family"].isin(frames.MATMULS)]
    totals = rest.groupby(frames.PLACE, sort=False)["share"].sum().reset_index()
    if totals.empty:
        return "Forward consists of matrix products alone."
    high = extreme(totals, "share", largest=True)
    text = f"Outside its matrix products forward spends {shares(totals, 'share', 3)} of its time."
    here = frames.of(rest, size=high["size"], context=high["context"])
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
    products = frames.of(every_family, family=set(frames.MATMULS))
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


def cores(collected: Collected) -> str:
    """On which cores the products ran, and why."""
    products = frames.of(frames.families(collected), family=set(frames.MATMULS))
    if products.empty:
        return "No matrix product was recorded."
    if collected.device == "cpu":
        return "A CPU has no tensor cores to choose; its products are one family."
    points = frames.points(collected)
    precisions = frames.order(frames.of(points, status="ok"), "precision")
    return " ".join(
        _cores_in(
            collected,
            precision,
            frames.of(products, precision=precision),
            bool(frames.of(points, status="ok", precision=precision)["tf32"].any()),
        )
        for precision in precisions
    )


def _cores_in(collected: Collected, precision: str, products: pd.DataFrame, tf32: bool) -> str:
    totals = products.groupby("family")["total_ms"].sum() / products["total_ms"].sum()
    tensor, simt, untold = (float(totals.get(family, 0.0)) for family in frames.MATMULS)
    if untold >= ALL_OF_IT:
        return f"The names of the products in {precision} do not tell on which cores they ran."
    untold_ = f" ({percent(untold, 2)} do not tell)" if untold > 1 - ALL_OF_IT else ""
    split = f"{_split(tensor, simt)}{untold_}"
    if precision == "fp32" and not tf32:
        return f"In fp32 {split}: {_fp32_reason(tensor, simt)} {_alignment(collected, precision)}"
    return f"In {precision} {split}: {_fallback(collected, precision, simt)}"


def _split(tensor: float, simt: float) -> str:
    if not tensor:
        return "none of the products' time is on tensor cores"
    if not simt:
        return "none of the products' time is on SIMT cores"
    return (
        f"{percent(simt)} of the products' time is on SIMT cores and {percent(tensor)} on tensor "
        "cores"
    )


def _fp32_reason(tensor: float, simt: float) -> str:
    if not tensor:
        return "they multiply 16-bit numbers and TF32, and with TF32 off fp32 is neither."
    if not simt:
        return "TF32 is off, and yet the names are those of kernels for tensor cores."
    return "TF32 is off, so those on tensor cores emulate fp32 or are named as if they did."


def _alignment(collected: Collected, precision: str) -> str:
    """What the names say about the alignment of the products' operands."""
    kernels = frames.kernels(collected)
    rows = frames.of(kernels, precision=precision, family=set(frames.MATMULS), mode="train_step")
    found = rows["name"].map(_alignment_of)
    told = rows[found.notna()]
    if told.empty:
        return "Their names tell nothing of alignment, which fp32 on SIMT cores does not ask for."
    loose = told[found[found.notna()] == 1]
    share = loose["total_ms"].sum() / rows["total_ms"].sum()
    if not share:
        return "All that name an alignment ask for more than one number, so every operand has it."
    return (
        f"{percent(share, 2)} of their time is in kernels that ask for no alignment (align1): on "
        "SIMT cores any operand will do."
    )


def _alignment_of(name: str) -> int | None:
    found = [int(number) for number in _ALIGNMENT.findall(name)]
    return min(found) if found else None


def _fallback(collected: Collected, precision: str, simt: float) -> str:
    """Why some products did not go to tensor cores although the precision allows it."""
    if simt <= 1 - ALL_OF_IT:
        return "every product that could use them did."
    multiple = ALIGNED_TO.get(precision, 8)
    uneven = _uneven_sides(collected, precision, multiple)
    if uneven:
        return (
            f"a side that is no multiple of {multiple} leaves operands unaligned, and here "
            f"{listed(uneven)} are none."
        )
    return (
        f"every side is a multiple of {multiple}, so alignment is not the reason; the library "
        "chose them, products with a vector or a sliver among them."
    )


def _uneven_sides(collected: Collected, precision: str, multiple: int) -> list[str]:
    found: dict[str, None] = {}
    for result in collected.results:
        asked = {**result.settings, **result.parameters}
        if result.status == "ok" and asked["precision"] == precision:
            sides = {name: asked[name] for name in SIDES}
            sides["head dimension"] = asked["d_model"] // asked["num_heads"]
            found.update(
                {f"{name} {value}": None for name, value in sides.items() if value % multiple}
            )
    return list(found)
