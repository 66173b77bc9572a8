"""Figures of the collectives: bandwidth against size, and the lines through all-reduce times."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lmlab.writeup import style
from lmlab.writeup.collect import Collected
from lmlab.writeup.figure import Drawing
from lmlab.writeup.frames import collectives as frames
from lmlab.writeup.frames.collectives import MIB, OPERATIONS
from lmlab.writeup.tables.collectives import where_measured

COLUMNS = 2
FITTED = "all_reduce"


def figures(collected: Collected) -> dict[str, Drawing]:
    """All figures by name; bandwidths have one a format."""
    every = frames.frame(collected.rows)
    data = frames.measured(every)
    sent = frames.between_ranks(every)
    moved = data[data["bus_gb_per_s"].notna()]
    fitted = frames.of(data, operation=FITTED)
    lines = frames.of(frames.fits(data), operation=FITTED)
    where = where_measured(collected.rows) if len(data) else ""
    arms = frames.order(data, "arm")
    return {
        **{
            f"bandwidth_{dtype}": _bandwidth(frames.of(sent, dtype=dtype), str(dtype), arms, where)
            for dtype in frames.order(moved, "dtype") or ["fp32"]
        },
        "fit": Drawing(
            alt="Time of an all-reduce against its size, with the fitted line of each set of ranks",
            caption="Markers are medians of the slowest rank, lines are latency plus size over "
            f"bandwidth; both axes are logarithmic. {where}"
            f"{_ends(frames.of(every, operation=FITTED))}",
            draw=(lambda: _draw_fits(fitted, lines, arms)) if len(lines) else None,
        ),
    }


def _bandwidth(sent: pd.DataFrame, dtype: str, arms: list[str], where: str) -> Drawing:
    here = frames.measured(sent)
    return Drawing(
        alt=f"Bus bandwidth of each operation against size in {dtype}, a line per set of ranks",
        caption=f"From medians of the slowest rank, {dtype}; both axes are logarithmic. {where}"
        f"{_ends(sent)}",
        draw=(lambda: _draw_bandwidths(here, arms)) if len(here) else None,
    )


def _ends(every: pd.DataFrame) -> str:
    """Why some lines do not reach the largest size."""
    cut = every[every["cut"]]
    if not len(cut):
        return ""
    largest = frames.asked_for(every["size_bytes"].max())
    return (
        f" A line that ends before {largest} does so because its job's time "
        f"({frames.time_caps(cut)}) was up."
    )


def _draw_bandwidths(here: pd.DataFrame, arms: list[str]) -> Figure:
    """`arms` are those of the whole chapter: a set of ranks looks the same in every figure."""
    operations = frames.order(here, "operation")
    rows = -(-len(operations) // COLUMNS)
    figure, axes = style.panels(rows, COLUMNS, height=2.5, sharex=True, sharey=True)
    for axis in axes[len(operations) :]:
        axis.set_visible(False)
    for axis, operation in zip(axes, operations, strict=False):
        for arm in frames.order(here, "arm"):
            part = frames.of(here, arm=arm, operation=operation).sort_values("size_bytes")
            axis.plot(
                part["size_bytes"] / MIB, part["bus_gb_per_s"], label=arm,
                **style.series(arms.index(arm)),
            )  # fmt: skip
        axis.set_title(OPERATIONS[operation])
    _size_axis(axes, here)
    for axis in axes[::COLUMNS]:
        axis.set_ylabel("Bus bandwidth (GB/s)")
    style.log_axis(axes[0], "y")
    _legend(figure, axes[0])
    return figure


def _draw_fits(data: pd.DataFrame, lines: pd.DataFrame, arms: list[str]) -> Figure:
    dtypes = frames.order(lines, "dtype")
    figure, axes = style.panels(1, len(dtypes), height=3.4, sharex=True, sharey=True)
    for axis, dtype in zip(axes, dtypes, strict=True):
        for _, line in frames.of(lines, dtype=dtype).iterrows():
            points = frames.of(data, arm=line["arm"], dtype=dtype)
            _draw_fit(axis, points, line, arms.index(line["arm"]))
        axis.set_title(f"{OPERATIONS[FITTED]}, {dtype}")
    _size_axis(axes, data)
    for axis in axes:
        axis.set_xlabel("Size (MiB)")
    axes[0].set_ylabel("Time of the slowest rank (ms)")
    style.log_axis(axes[0], "y")
    _legend(figure, axes[0])
    return figure


def _draw_fit(axis: Axes, points: pd.DataFrame, line: pd.Series, index: int) -> None:
    look = style.series(index)
    sizes = np.geomspace(points["size_bytes"].min(), points["size_bytes"].max(), 60)
    times = line["latency_ms"] + 1e3 * line["seconds_per_byte"] * sizes
    axis.plot(sizes / MIB, times, color=look["color"], linestyle=look["linestyle"])
    axis.plot(
        points["size_bytes"] / MIB, points["median_ms"], label=str(line["arm"]),
        color=look["color"], linestyle="none", marker=look["marker"],
    )  # fmt: skip


def _size_axis(axes: list[Axes], data: pd.DataFrame) -> None:
    """Sizes as asked for, those that would touch on a logarithmic axis left out."""
    shown: list[int] = []
    for size in sorted({frames.nominal_mib(size) for size in data["size_bytes"]}):
        if not shown or size >= 1.5 * shown[-1]:
            shown.append(size)
    for axis in axes:
        style.log_axis(axis, "x", ticks=shown)
        axis.set_xticks(shown, [f"{size:,}" for size in shown])
    for axis in axes[-COLUMNS:]:
        axis.set_xlabel("Size (MiB)")


def _legend(figure: Figure, axis: Axes) -> None:
    handles, labels = axis.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(len(labels), 3))
