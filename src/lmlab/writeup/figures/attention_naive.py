"""Naive attention against its sequence: time, and memory beside what the formula says."""

from __future__ import annotations

from collections.abc import Callable

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
MEMORY = {
    "memory_before_backward_bytes": "Held before backward",
    "peak_memory_bytes": "Peak, in backward",
    "saved_bytes": "Kept for backward",
}
BROKEN = "A line is broken where a shape is not measured or did not fit."


def naive_figures(collected: Collected, data: pd.DataFrame) -> dict[str, Drawing]:
    """Time and memory over the sequence; none of a single one, which the table tells as well."""
    rows = frames.of(data, topic="naive")
    if not len(rows) or frames.is_a_dot(rows, "sequence"):
        return {}
    results = [row.result for row in frames.rows_of(collected, "naive") if row.result is not None]
    timed = frames.measured(rows)
    held = _with_memory(timed)
    note = describe(results)
    return {
        "naive_time": Drawing(
            alt="Time of naive attention against sequence, eager and compiled, a line a head dim",
            caption=f"Median time of one pass; both axes are logarithmic. {BROKEN} {note}",
            draw=_if(len(timed), lambda: _times(timed)),
        ),
        "naive_memory": Drawing(
            alt="Memory of naive attention against sequence, a line a head dim",
            caption="Memory of the eager arm's tensors; both axes are logarithmic, the grey line "
            f"grows with the square of the sequence. {BROKEN} {collected.device_name}.",
            draw=_if(len(held), lambda: _memory(held)),
        ),
    }


def _if(there: int, draw: Callable[[], Figure]) -> Callable[[], Figure] | None:
    return draw if there else None


def _with_memory(timed: pd.DataFrame) -> pd.DataFrame:
    """Rows of the eager arm that say what they hold; on a CPU only autograd counts."""
    eager = frames.of(timed, arm=frames.NAIVE, pass_="forward")
    return eager[eager[list(MEMORY)].notna().any(axis=1)]


def _times(rows: pd.DataFrame) -> Figure:
    arms = frames.order(rows, "arm")
    passes = frames.PASSES["naive"]
    figure, axes = style.panels(len(arms), len(passes), height=2.5, sharex=True, sharey=True)
    shown = [(arm, name) for arm in arms for name in passes]
    for axis, (arm, name) in zip(axes, shown, strict=True):
        _lines(axis, frames.of(rows, arm=arm, pass_=name), "median_ms", rows)
        axis.set_title(f"{frames.label(arm).capitalize()}, {name}")
    for axis in axes[:: len(passes)]:
        axis.set_ylabel("Time (ms)")
    _finish(figure, axes, rows, len(passes))
    return figure


def _memory(rows: pd.DataFrame) -> Figure:
    columns = [column for column in MEMORY if rows[column].notna().any()]
    columns = [c for c in columns if c != "saved_bytes"] or columns
    figure, axes = style.panels(1, len(columns), height=3.0, sharex=True, sharey=True)
    for axis, column in zip(axes, columns, strict=True):
        here = rows.assign(gib=rows[column].astype(float) / GIB)
        _lines(axis, here, "gib", rows)
        _square(axis, here)
        axis.set_title(MEMORY[column])
    axes[0].set_ylabel("Memory (GiB)")
    _finish(figure, axes, rows, len(columns))
    return figure


def _square(axis: Axes, rows: pd.DataFrame) -> None:
    """A guide through the largest value: what grows with the square runs along it."""
    last = rows.sort_values("gib").iloc[-1]
    x = sorted(set(rows["sequence"]))
    y = [last["gib"] * (value / last["sequence"]) ** 2 for value in x]
    axis.plot(x, y, color=style.GUIDE, linewidth=0.9, zorder=0, label="_square")


def _lines(axis: Axes, rows: pd.DataFrame, y: str, every: pd.DataFrame) -> None:
    sequences = sorted(set(every["sequence"]))
    for index, head_dim in enumerate(frames.order(every, "head_dim")):
        part, look = frames.of(rows, head_dim=head_dim), style.series(index)
        lines.draw(axis, part, ("sequence", y), sequences, str(head_dim), **look)


def _finish(figure: Figure, axes: list[Axes], rows: pd.DataFrame, columns: int) -> None:
    sequences = sorted(set(rows["sequence"]))
    for axis in axes:
        style.log_axis(axis, "x", ticks=sequences)
    for axis in axes[-columns:]:
        axis.set_xlabel("Sequence (tokens)")
    style.log_axis(axes[0], "y")
    style.legend_below(figure, axes[0], title="Head dim")
