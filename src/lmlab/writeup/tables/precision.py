"""Tables of the precision chapter: four sums, autocast's data types, variance over input scales."""

from __future__ import annotations

import math

import pandas as pd

from lmlab.writeup.caption import describe
from lmlab.writeup.collect import Collected, Row, sources_of
from lmlab.writeup.frames import precision as frames
from lmlab.writeup.numbers import exact, percent, signed, significant
from lmlab.writeup.table import NOTHING, STATUS_CELLS, Column, Table

LAYERNORM_EPS = 1e-5
"""PyTorch's own, with which the experiment's LayerNorm is called."""


def tables(collected: Collected) -> dict[str, Table]:
    """All tables by name."""
    return {
        "accumulation": accumulation(collected),
        "autocast": autocast(collected),
        "layernorm": layernorm(collected),
        **layernorm_output(collected),
    }


def accumulation(collected: Collected) -> Table:
    """The four loops and how far each ends from the exact sum."""
    used = frames.rows_of(collected, "accumulation")
    data = frames.data_of(collected, "accumulation")
    loops = frames.loops(collected)
    body = [
        [
            frames.LOOPS.get(name, name),
            str(row["accumulator"]),
            str(row["term"]),
            f"{row['result']:.7f}",
            signed(row["error"]),
            percent(abs(row["error"]) / row["exact"], 2),
        ]
        for name, row in loops.items()
    ] or [[STATUS_CELLS[frames.status_of(collected, "accumulation")], *[NOTHING] * 5]]
    what = f"{data['term']:g} added {data['terms']:,} times." if data is not None else ""
    return Table(
        title="One sum in four ways",
        columns=[
            Column("Loop", "left"),
            Column("Accumulator", "left"),
            Column("Term", "left"),
            Column("Result"),
            Column("Error"),
            Column("Relative error"),
        ],
        rows=body,
        caption=what or "Nothing measured.",
        sources=sources_of(used),
    )


def autocast(collected: Collected) -> Table:
    """Which data type each part of the toy model has."""
    used = frames.rows_of(collected, "autocast")
    found = frames.autocast(collected)
    body = [
        [label, *(_component(row, found, name) for row in used)]
        for name, label in frames.COMPONENTS.items()
    ]
    titles = [f"Autocast to {row.point.parameters['dtype']}" for row in used]
    return Table(
        title="Data types in a toy model under autocast",
        columns=[Column("What", "left"), *(Column(title, "left") for title in titles)],
        rows=body,
        caption="fc1, ReLU, LayerNorm, fc2 and a loss, read by hooks in one training step. "
        f"{where(used)}",
        sources=sources_of(used),
    )


def _component(row: Row, found: dict[str, dict[str, str]], name: str) -> str:
    if row.status != "ok":
        return STATUS_CELLS[row.status]
    return found[str(row.point.parameters["dtype"])].get(name, NOTHING)


def layernorm(collected: Collected) -> Table:
    """Relative error of the variance, a row a scale and a column a type."""
    used = frames.rows_of(collected, "layernorm")
    rows = frames.variances(collected)
    dtypes = list(dict.fromkeys(rows["dtype"]))
    body = []
    for scale, here in _by_scale(rows):
        cells = [_variance(here[here["dtype"] == dtype]) for dtype in dtypes]
        body.append([exact(scale), significant(float(here["true_variance"].iloc[0])), *cells])
    if not body:
        body = [[STATUS_CELLS[frames.status_of(collected, "layernorm")], NOTHING]]
    return Table(
        title="Variance of one input at growing and shrinking scales: relative error by data type",
        columns=[Column("Scale of the input"), Column("True variance"), *map(Column, dtypes)],
        rows=body,
        caption="Mean square around the mean: differences, squares and result in the type named, "
        "sums in fp32, as PyTorch takes them; the largest error of all rows of the input, against "
        f"double precision. {where(used)}",
        sources=sources_of(used),
    )


def layernorm_output(collected: Collected) -> dict[str, Table]:
    """How far LayerNorm's own output is off, where that was measured."""
    used = frames.rows_of(collected, "layernorm")
    rows = frames.output_errors(collected)
    if not len(rows):
        return {}
    dtypes = list(dict.fromkeys(rows["dtype"]))
    body = [
        [
            exact(scale),
            *(_output(here[here["dtype"] == dtype]["largest_error"]) for dtype in dtypes),
        ]
        for scale, here in _by_scale(rows)
    ]
    table = Table(
        title="PyTorch's LayerNorm on the same inputs: largest error of its output by data type",
        columns=[Column("Scale of the input"), *map(Column, dtypes)],
        rows=body,
        caption="Against double precision. Outputs are of order one where the variance is well "
        f"above eps = {significant(LAYERNORM_EPS, 1)}, which LayerNorm adds to it, and smaller "
        "below, errors with them. Inputs and output have the type named. "
        f"{where(used)}",
        sources=sources_of(used),
    )
    return {"layernorm_output": table}


def _by_scale(rows: pd.DataFrame) -> list[tuple[float, pd.DataFrame]]:
    return [(scale, rows[rows["scale"] == scale]) for scale in sorted(set(rows["scale"]))]


def _output(errors: pd.Series) -> str:
    if not len(errors):
        return NOTHING
    error = float(errors.iloc[0])
    return "not finite" if math.isnan(error) else significant(error, 2)


def _variance(rows: pd.DataFrame) -> str:
    if not len(rows):
        return NOTHING
    row = rows.iloc[0]
    if row["overflow"]:
        return "overflow"
    if row["underflow"]:
        return "underflow"
    error = row["relative_error"]
    return NOTHING if math.isnan(error) else significant(error, 2)


def where(used: list[Row]) -> str:
    """The device as the results name it."""
    return describe([row.result for row in used if row.result is not None])
