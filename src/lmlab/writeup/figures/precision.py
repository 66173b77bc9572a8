"""Figures of the precision chapter: a sum that drifts, and a variance that leaves its range."""

from __future__ import annotations

from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lmlab.writeup import style
from lmlab.writeup.collect import Collected
from lmlab.writeup.figure import Drawing
from lmlab.writeup.frames import precision as frames
from lmlab.writeup.numbers import power_of_ten
from lmlab.writeup.tables.precision import where

# Overflow and underflow have no error to plot; they stand in rows of their own above the data.
OFF_SCALE_ROWS = {"overflow": 30.0, "underflow": 8.0}


def figures(collected: Collected) -> dict[str, Drawing]:
    """All figures by name."""
    trace, variances = frames.trace(collected), frames.variances(collected)
    data = frames.data_of(collected, "accumulation")
    norms = frames.rows_of(collected, "layernorm")
    return {
        "fp16_sum": Drawing(
            alt="Error of a running fp16 sum; spacing of fp16 numbers against what is added",
            caption="Left: the running fp16 sum minus the exact one. Right: the spacing of fp16 "
            "numbers at the sum, the term, and what each addition really added.",
            draw=(lambda: _draw_sum(trace, float(data["term"]))) if data and len(trace) else None,
        ),
        "variance": Drawing(
            alt="Relative error of a variance against the scale of its input, by data type",
            caption="Both axes are logarithmic; variances that overflow or vanish are marked in "
            f"the rows above the data. {where(norms)}",
            draw=(lambda: _draw_variance(variances)) if len(variances) else None,
        ),
    }


def _draw_sum(trace: pd.DataFrame, term: float) -> Figure:
    figure, (error, step) = style.panels(1, 2, height=3.0)
    look = style.series(0)
    error.axhline(0, color=style.GUIDE, linewidth=1)
    error.plot(trace["step"], trace["sum"] - term * trace["step"], color=look["color"])
    error.set_xlabel("Terms added")
    error.set_ylabel("Running sum − exact sum")
    error.set_title("Error of the fp16 sum")
    step.axhline(term, color=style.GUIDE, linewidth=1, label=f"the term, {term:g}")
    step.plot(trace["step"], trace["spacing"], drawstyle="steps-post", label="spacing", **_line(2))
    step.plot(trace["step"], trace["added"], linestyle="none", marker=".", markersize=4,
              color=style.COLOURS[1], label="really added")  # fmt: skip
    step.set_xlabel("Terms added")
    step.set_ylabel("Step size")
    style.log_axis(step, "y")
    step.set_title("Spacing of fp16 numbers at the sum")
    step.legend(loc="lower right")
    return figure


def _line(index: int) -> dict[str, Any]:
    return {"color": style.COLOURS[index], "linestyle": "-"}


def _draw_variance(rows: pd.DataFrame) -> Figure:
    figure, (axis,) = style.panels(1, 1, height=3.6)
    for index, dtype in enumerate(dict.fromkeys(rows["dtype"])):
        _draw_type(axis, rows[rows["dtype"] == dtype], str(dtype), index)
    axis.set_xlabel("Scale of the input")
    axis.set_ylabel("Relative error of the variance")
    style.log_axis(axis, "x")
    style.log_axis(axis, "y")
    errors = rows["relative_error"][rows["relative_error"] > 0]
    decades = [10.0**power for power in range(-10, 1) if 10.0**power >= errors.min() / 10]
    axis.set_yticks(
        [*decades, *OFF_SCALE_ROWS.values()],
        [*map(power_of_ten, decades), *OFF_SCALE_ROWS],
    )
    style.legend_below(figure, axis)
    return figure


def _draw_type(axis: Axes, rows: pd.DataFrame, dtype: str, index: int) -> None:
    rows = rows.sort_values("scale")
    inside = rows[~rows["overflow"] & ~rows["underflow"] & (rows["relative_error"] > 0)]
    look = style.series(index)
    axis.plot(inside["scale"], inside["relative_error"], label=dtype, **look)
    for what, height in OFF_SCALE_ROWS.items():
        marks = rows[rows[what]]
        axis.plot(
            marks["scale"], [height] * len(marks), linestyle="none", marker=look["marker"],
            color=look["color"],
        )  # fmt: skip
