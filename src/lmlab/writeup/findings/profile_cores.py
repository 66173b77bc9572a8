"""On which cores the matrix products ran, and why.

That products run on SIMT cores is no mystery and no accident: tensor cores multiply 16-bit numbers
and TF32, so fp32 with TF32 off cannot use them. In the other precisions a product falls back when
its operands are not aligned to 16 bytes; then some side of it is no multiple of 8 (of 4 in TF32).
"""

from __future__ import annotations

import re

import pandas as pd

from lmlab.writeup import profile_words as words
from lmlab.writeup.collect import Collected
from lmlab.writeup.frames import profile as frames
from lmlab.writeup.numbers import listed, percent

ALL_OF_IT = 0.999
ALIGNED_TO = {"bf16": 8, "fp16": 8, "tf32": 4}
SIDES = ("d_model", "d_ff", "vocab_size", "context")
_ALIGNMENT = re.compile(r"align[abc]?(\d+)")


def cores(collected: Collected) -> str:
    """On which cores the products ran, and why."""
    products = frames.of(frames.families(collected), family=set(words.MATMULS))
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
    tensor, simt, untold = (float(totals.get(family, 0.0)) for family in words.MATMULS)
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
    rows = frames.of(kernels, precision=precision, family=set(words.MATMULS), mode="train_step")
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
