"""Tables of attention's parts: time beside FLOPs and bytes, over contexts."""

from __future__ import annotations

import math

import pandas as pd

from lmlab.writeup import profile_words as words
from lmlab.writeup.collect import Collected, sources_of
from lmlab.writeup.frames import profile as frames
from lmlab.writeup.numbers import factor, percent, significant
from lmlab.writeup.table import NOTHING, Column, Table
from lmlab.writeup.tables.profile_rows import Key, at, by_point, place_columns, recorded

PRODUCTS = {"scores", "output"}
NO_PARTS = "no parts"


def summary(collected: Collected) -> Table:
    """Softmax against the two products, one row a point."""
    points, parts = frames.points(collected), frames.parts(collected)

    def cells(key: Key) -> list[str]:
        here = at(parts, key)
        if here.empty:
            return [NO_PARTS, *[NOTHING] * 5]
        times = here.set_index("part")["total_ms"]
        products, softmax = frames.of(here, part=PRODUCTS), frames.of(here, part="softmax").iloc[0]
        return [
            *(significant(times[part]) for part in words.PARTS),
            factor(softmax["total_ms"] / products["total_ms"].sum()),
            _ratio(softmax["flops"], products["flops"].sum()),
        ]

    titles = [
        *(f"{words.part_title(part)} (ms)" for part in words.PARTS),
        "Softmax / products, time",
        "Softmax / products, FLOPs",
    ]
    return Table(
        title="Attention in one forward pass, all layers: its parts",
        columns=[*place_columns(points), *(Column(title) for title in titles)],
        rows=by_point(points, len(titles), cells),
        caption=f"{recorded(collected.results, collected)} Softmax counts 5 FLOPs for each of the "
        "batch × heads × T × T scores, a product 2 × head dimension. A product's time includes "
        "copies of its operands where it needs them.",
        sources=sources_of(collected.rows),
    )


def _ratio(part: float, whole: float) -> str:
    return NOTHING if math.isnan(part) or not whole else factor(part / whole)


def details(collected: Collected) -> dict[str, Table]:
    """Time, FLOPs, bytes and rates of every part at every context, a table a size."""
    parts = frames.parts(collected)
    return {
        f"attention_{size}": _details(collected, frames.of(parts, size=size), str(size))
        for size in frames.order(parts, "size")
    }


def _details(collected: Collected, parts: pd.DataFrame, size: str) -> Table:
    rows = [row for row in collected.rows if row.point.parameters["size"] == size]
    work, moved = words.prefix(parts["flops"]), words.prefix(parts["bytes"])
    rate = words.prefix(1e12 * parts["tflops"])
    titles = [
        *("Context", "Part", "Time (ms)", "Of attention", f"{work}FLOPs", f"{moved}B moved"),
        *(f"{rate}FLOP/s", "GB/s", "FLOPs a byte"),
    ]
    return Table(
        title=f"Attention's parts in one forward pass of {size}",
        columns=[Column(title, "left" if title == "Part" else "right") for title in titles],
        rows=[_detail(row, work, moved, rate) for _, row in parts.iterrows()],
        caption=f"{recorded([row.result for row in rows if row.result], collected)} FLOPs and "
        "bytes are the cost model's: bytes the least that each operator by itself must move.",
        sources=sources_of(rows),
    )


def _detail(row: pd.Series, work: str, moved: str, rate: str) -> list[str]:
    return [
        str(row["context"]),
        words.PART_NAMES[row["part"]],
        significant(row["total_ms"]),
        percent(row["share"], 2),
        _counted(row["flops"] / words.PREFIXES[work]),
        _counted(row["bytes"] / words.PREFIXES[moved]),
        _counted(1e12 * row["tflops"] / words.PREFIXES[rate]),
        _counted(row["gb_per_s"]),
        _counted(row["flops"] / row["bytes"]),
    ]


def _counted(value: float) -> str:
    return "not counted" if math.isnan(value) else significant(value)
