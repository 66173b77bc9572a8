"""What 16 bits lose: growing sums, what autocast keeps in fp32, and LayerNorm's variance."""

from typing import Any

import pandas as pd

from lmlab.report.figure import Axis, Figure
from lmlab.report.frame import Results, Rows, select, values_of
from lmlab.report.page import Chapter
from lmlab.report.table import Table, quantity

TITLE = "Precision"


def fp16_sum(results: Results) -> Rows:
    """Error of the running fp16 sum after each addition."""
    for result in results.of("precision"):
        if trace := result.data.get("fp16_trace"):
            rows = pd.DataFrame(trace)
            return rows.assign(value=rows["sum"] - rows["step"] * result.settings["term"])
    return pd.DataFrame()


def _readable(rows: Rows, field: str) -> Rows:
    """Numbers of a label as a person writes them: 0.25, not 0.25000000."""
    known = rows[rows[field].notna()] if field in rows else rows.head(0)
    return known.assign(**{field: known[field].map("{:g}".format)}) if len(known) else known


BY_SCALE: Any = {
    "rows": ["scale"],
    "where": {"topic": "layernorm"},
    "data": lambda rows: _readable(rows, "scale"),
}
TABLES = {
    "formats": Table(
        title="Number formats, and the sum at which adding the same term again changes nothing",
        rows=["dtype"],
        headers={"dtype": "format"},
        where={"topic": "formats"},
        # Columns without {term} take the last term, the study's own: `stalls_at` has 1 first.
        data=lambda rows: _readable(rows, "term").sort_values(
            "quantity", key=lambda names: names != "stalls_at", kind="stable"
        ),
        columns={
            "exponent bits": quantity("exponent_bits", "integer"),
            "mantissa bits": quantity("mantissa_bits", "integer"),
            "smallest normal, 2^": quantity("smallest_power", "integer"),
            "upper bound, 2^": quantity("largest_power", "integer"),
            "spacing at 1": quantity("spacing", "scientific"),
            "adding {term} stalls at": quantity("stalls_at", "integer"),
        },
    ),
    "sums": Table(
        title="Equal terms added one by one, and the difference from the exact sum",
        rows=["loop"],
        where={"topic": "accumulation"},
        columns={"sum": quantity("sum", "digits"), "error": quantity("error", "scientific")},
    ),
    "autocast": Table(
        title="Data types in a toy model under autocast",
        rows=["component"],
        where={"topic": "autocast"},
        columns={"autocast to {dtype}": quantity("dtype_of", "text")},
    ),
    "variance": Table(
        title="Relative error of a variance by scale of the input, partial sums in {sums}",
        columns={"{dtype}": quantity("variance_error", "scientific", sums=pd.notna)},
        **BY_SCALE,
    ),
    "layernorm": Table(
        title="Largest error of LayerNorm's output, with statistics in fp32 (nn.LayerNorm) and "
        "accumulated in the format itself",
        columns={
            "{dtype}, fp32 sums": quantity("output_error", "scientific", sums=pd.isna),
            "{dtype}, own sums": quantity("output_error", "scientific", sums=pd.notna),
        },
        **BY_SCALE,
    ),
}

FIGURES = {
    "fp16_sum": Figure(
        title="Error of the running fp16 sum: the spacing of fp16 numbers grows with the sum",
        x=Axis(field="step", title="additions"),
        y=Axis("computed minus exact sum"),
        data=fp16_sum,
    ),
    "variance": Figure(
        title="Relative error of a variance by format of its sums (gaps: overflow or underflow)",
        facet="sums",
        color="dtype",
        x=Axis(field="scale", title="scale of the input (powers of four)", log=64),
        y=Axis("relative error", log=10),
        where={"topic": "layernorm", "quantity": "variance_error"},
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
        "kept": _names(dtypes, "component", value="float32"),
        "lowered": _names(dtypes, "component", value=lambda dtype: dtype != "float32"),
        "variance": {
            sums_in: select(errors, sums=sums_in).groupby("dtype")["value"].median().to_dict()
            for sums_in in ("fp32", "own format")
        }
        if len(errors)
        else {},
        "output": _output_errors(select(rows, quantity="output_error")),
        "overflow": _names(failed, "dtype", reason="overflow"),
        "underflow": _names(failed, "dtype", reason="underflow"),
    }


def _output_errors(errors: Rows) -> dict[str, tuple[float, float]]:
    """By format: the median error with statistics in fp32 and in the format itself."""
    if errors.empty or errors["sums"].isna().all():
        return {}
    found = errors.groupby(["dtype", errors["sums"].notna()])["value"].median().unstack()
    return {str(dtype): (row[False], row[True]) for dtype, row in found.iterrows()}


def _names(rows: Rows, label: str, **where: Any) -> list[str]:
    """Values of a label among the rows that match, as words."""
    return [name.replace("_", " ") for name in values_of(select(rows, **where), label)]
