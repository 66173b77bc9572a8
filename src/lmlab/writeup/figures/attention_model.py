"""The model with each attention: time and peak memory of a train step against the context."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lmlab.writeup import style
from lmlab.writeup.caption import describe
from lmlab.writeup.collect import Collected
from lmlab.writeup.figure import Drawing
from lmlab.writeup.figures import attention_lines as lines
from lmlab.writeup.frames import attention as frames

GIB = 2**30


def model_figures(collected: Collected, data: pd.DataFrame) -> dict[str, Drawing]:
    """The figure; none where the study leaves the topic out, or of a single context."""
    rows = frames.of(data, topic="model")
    if not len(rows) or frames.is_a_dot(rows, "context"):
        return {}
    timed = frames.measured(rows)
    used = [r.result for r in frames.rows_of(collected, "model") if r.result is not None]
    return {
        "model_attention": Drawing(
            alt="Time and peak memory of a train step against context, a line an attention",
            caption="Median time of a train step and the most memory that it holds; both axes are "
            f"logarithmic. A line ends or breaks where a step has no time. {describe(used)}",
            draw=(lambda: _draw(timed)) if len(timed) else None,
        )
    }


def _draw(rows: pd.DataFrame) -> Figure:
    sizes, arms = frames.order(rows, "size"), frames.arms_of(rows)
    contexts = sorted(set(rows["context"]))
    rows = rows.assign(gib=rows["peak_memory_bytes"].astype(float) / GIB)
    values = {"median_ms": "Time (ms)", "gib": "Peak memory (GiB)"}
    shown = [column for column in values if rows[column].notna().any()]
    figure, axes = style.panels(len(shown), len(sizes), height=2.3, sharex=True, sharey="row")
    for index, column in enumerate(shown):
        line = axes[index * len(sizes) : (index + 1) * len(sizes)]
        for axis, size in zip(line, sizes, strict=True):
            _lines(axis, frames.of(rows, size=size), column, arms, contexts)
        line[0].set_ylabel(values[column])
        style.log_axis(line[0], "y")
    _contexts(axes, contexts, sizes)
    style.legend_below(figure, axes[0], title="Attention")
    return figure


def _lines(
    axis: Axes, rows: pd.DataFrame, column: str, arms: Sequence[str], contexts: Sequence[int]
) -> None:
    for arm in arms:
        part, look = frames.of(rows, arm=arm), lines.look(arm)
        lines.draw(axis, part, ("context", column), contexts, frames.label(arm), **look)


def _contexts(axes: Sequence[Axes], contexts: Sequence[int], sizes: Sequence[str]) -> None:
    for axis in axes:
        style.log_axis(axis, "x", ticks=contexts)
        axis.set_xticks(contexts, [f"{context:,}" for context in contexts], rotation=45)
    for axis, size in zip(axes, sizes, strict=False):
        axis.set_title(str(size))
    for axis in axes[-len(sizes) :]:
        axis.set_xlabel("Context (tokens)")
