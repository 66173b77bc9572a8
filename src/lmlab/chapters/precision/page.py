"""What 16 bits lose: growing sums, what autocast keeps in fp32, and LayerNorm's variance."""

from __future__ import annotations

from typing import Any

import pandas as pd

from lmlab.report.figure import Axis, Figure, value_axis
from lmlab.report.frame import Results, Rows, select
from lmlab.report.page import Chapter
from lmlab.report.table import Table, quantity

TITLE = "Precision"


def fp16_sum(results: Results) -> Rows:
    """Error of the running fp16 sum after each addition."""
    for result in results.of("precision"):
        if trace := result.data.get("fp16_trace"):
            term = float(result.settings["term"])
            steps = zip(trace["step"], trace["sum"], strict=True)
            return pd.DataFrame(
                [{"step": step, "value": total - step * term} for step, total in steps]
            )
    return results.rows.head(0)


def stalled_sums(results: Results) -> Rows:
    """Running sums of ones, by format."""
    for result in results.of("precision"):
        if sums := result.data.get("stalled_sums"):
            rows = pd.DataFrame(sums).melt("step", var_name="dtype")
            return rows.astype(object)
    return results.rows.head(0)


def _readable(rows: Rows, field: str) -> Rows:
    """Numbers of a label as a person writes them: 0.25, not 0.25000000."""
    known = rows[rows[field].notna()] if field in rows else rows.head(0)
    return known.assign(**{field: known[field].map("{:g}".format)}) if len(known) else known


def _readable_scales(rows: Rows) -> Rows:
    return _readable(rows, "scale")


def _own_sums(label: Any) -> bool:
    return isinstance(label, str)


FORMAT = {"topic": "formats"}
TABLES = {
    "formats": Table(
        title="Number formats, and the sum at which adding the same term again changes nothing",
        rows=["dtype"],
        headers={"dtype": "format"},
        where=FORMAT,
        data=lambda rows: _readable(rows, "term"),
        columns={
            "exponent bits": quantity("exponent_bits", "integer"),
            "mantissa bits": quantity("mantissa_bits", "integer"),
            "from 2^": quantity("smallest_power", "integer"),
            "to 2^": quantity("largest_power", "integer"),
            "spacing at 1": quantity("spacing", "scientific"),
            "adding 1 stalls at": quantity("stalls_at", "integer", term="1"),
            "adding 0.01 stalls at": quantity("stalls_at", "integer", term="0.01"),
        },
    ),
    "sums": Table(
        title="0.01 added 1,000 times; the exact sum is 10",
        rows=["loop"],
        where={"topic": "accumulation"},
        columns={
            "sum": quantity("sum", "digits"),
            "error": quantity("error", "scientific"),
        },
    ),
    "autocast": Table(
        title="Data types in a toy model under autocast",
        rows=["component"],
        across="dtype",
        where={"topic": "autocast"},
        columns={"autocast to {dtype}": quantity("dtype_of", "text")},
    ),
    "variance": Table(
        title="Relative error of a variance by scale of the input, partial sums in {sums}",
        facet="sums",
        rows=["scale"],
        across="dtype",
        columns={"{dtype}": quantity("variance_error", "scientific", sums=_own_sums)},
        where={"topic": "layernorm"},
        data=_readable_scales,
    ),
    "layernorm": Table(
        title="Largest error of LayerNorm's output, with statistics in fp32 (nn.LayerNorm) and "
        "accumulated in the format itself",
        rows=["scale"],
        across="dtype",
        columns={
            "{dtype}, fp32 sums": quantity("output_error", "scientific", sums=pd.isna),
            "{dtype}, own sums": quantity("output_error", "scientific", sums=_own_sums),
        },
        where={"topic": "layernorm"},
        data=_readable_scales,
    ),
}

FIGURES = {
    "stalled_sums": Figure(
        title="Adding 1 again and again: a sum stalls where the spacing of its format reaches 2",
        mark="line",
        color="dtype",
        x=Axis(field="step", title="additions"),
        y=value_axis("sum"),
        data=stalled_sums,
        markers=False,
    ),
    "fp16_sum": Figure(
        title="Error of a running fp16 sum of 0.01: the spacing of fp16 numbers grows with the sum",
        mark="line",
        x=Axis(field="step", title="additions"),
        y=value_axis("sum minus exact", zero=False),
        data=fp16_sum,
        markers=False,
    ),
    "variance": Figure(
        title="Relative error of a variance, partial sums in fp32",
        mark="line",
        color="dtype",
        x=Axis(field="scale", title="scale of the input (powers of four)", log=4),
        y=value_axis("relative error", log=10),
        where={"topic": "layernorm", "quantity": "variance_error", "sums": "fp32"},
    ),
}


def facts(chapter: Chapter) -> dict[str, Any]:
    """Sums by loop, what autocast keeps in fp32, and typical variance errors."""
    rows = select(chapter.own.rows, status="ok")
    sums = select(rows, quantity="sum")
    dtypes = select(rows, quantity="dtype_of")
    errors = select(rows, quantity="variance_error")
    failed = select(chapter.own.rows, quantity="variance_error", status="unsupported")
    return {
        "sums": dict(zip(sums["loop"], sums["value"], strict=True)) if len(sums) else {},
        "kept": _components(dtypes[dtypes["value"] == "float32"]),
        "lowered": _components(dtypes[dtypes["value"] != "float32"]),
        "variance": {
            sums_in: select(errors, sums=sums_in).groupby("dtype")["value"].median().to_dict()
            for sums_in in ("fp32", "own format")
        }
        if len(errors)
        else {},
        "output": _output_errors(select(rows, quantity="output_error")),
        "overflow": _formats(failed, "overflow"),
        "underflow": _formats(failed, "underflow"),
    }


def _output_errors(errors: Rows) -> dict[str, tuple[float, float]]:
    """By format: the median error with statistics in fp32 and in the format itself, once both are
    measured."""
    if errors.empty or not errors["sums"].map(_own_sums).any():
        return {}
    found = errors.groupby(["dtype", errors["sums"].map(_own_sums)])["value"].median().unstack()
    return {str(dtype): (row[False], row[True]) for dtype, row in found.iterrows()}


def _components(rows: Rows) -> list[str]:
    names = dict.fromkeys(rows["component"]) if len(rows) else {}
    return [name.replace("_", " ") for name in names]


def _formats(rows: Rows, reason: str) -> list[str]:
    return list(dict.fromkeys(select(rows, reason=reason)["dtype"])) if len(rows) else []
