"""Peak memory and step time against the length of a checkpointed segment."""

from __future__ import annotations

import math
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lmlab.writeup import style
from lmlab.writeup.caption import describe
from lmlab.writeup.collect import Collected
from lmlab.writeup.figure import Drawing
from lmlab.writeup.frames import memory as frames
from lmlab.writeup.style import series as look
from lmlab.writeup.table import STATUS_CELLS

PREDICTED: dict[str, Any] = {
    "color": "black",
    "marker": "x",
    "markersize": 8,
    "linestyle": "none",
    "zorder": 5,
}


def checkpointing(collected: Collected) -> dict[str, Drawing]:
    """The figure, where the study has the point."""
    used = frames.rows_of(collected, frames.CHECKPOINTING)
    if not used:
        return {}
    arms = frames.arms(collected)
    ran = frames.measured(arms)
    place = used[0].point.parameters
    results = [row.result for row in used if row.result is not None]
    return {
        "checkpointing": Drawing(
            alt="Peak memory and step time against the number of blocks in a checkpointed segment",
            caption=f"{place['size']} at context {place['context']}, {place['precision']}. Lines "
            "across are strategies without a segment length; whiskers span the quartiles. "
            f"{describe(results)}",
            draw=(lambda: _draw(arms)) if len(ran) else None,
        )
    }


def _draw(arms: pd.DataFrame) -> Figure:
    figure, (memory, time) = style.panels(1, 2, height=3.2)
    every = frames.of(arms, kind="every").sort_values("blocks")
    unit, size = frames.unit_of([*arms["peak_bytes"], *arms["predicted_bytes"]])
    memory.plot(every["blocks"], every["peak_bytes"] / size, label="every k blocks", **look(0))
    memory.plot(every["blocks"], every["predicted_bytes"] / size, label="predicted", **PREDICTED)
    _across(memory, arms, "peak_bytes", size)
    memory.set_ylabel(f"Peak memory ({unit})")
    whiskers = [every["median_ms"] - every["q1_ms"], every["q3_ms"] - every["median_ms"]]
    time.errorbar(every["blocks"], every["median_ms"], yerr=whiskers, fmt="none", ecolor="#0072B2")
    time.plot(every["blocks"], every["median_ms"], label="every k blocks", **look(0))
    _across(time, arms, "median_ms", 1)
    time.set_ylabel("Training step (ms)")
    blocks = sorted(set(every["blocks"]))
    for axis, title in ((memory, "Peak memory"), (time, "Time of a step")):
        axis.set_title(title)
        axis.set_xlabel("Blocks in a segment, k")
        axis.set_ylim(bottom=0)
        if blocks:
            style.log_axis(axis, "x", ticks=blocks)
            axis.set_xticks(blocks, [str(block) for block in blocks])
    style.legend_below(figure, memory)
    return figure


def _across(axis: Axes, arms: pd.DataFrame, column: str, size: int) -> None:
    for index, (kind, label) in enumerate((("none", "everything kept"), ("nested", "nested")), 1):
        for _, arm in frames.of(arms, kind=kind).iterrows():
            if arm["status"] == "ok":
                axis.axhline(arm[column] / size, label=label, **across(index))
            elif column == "peak_bytes" and not math.isnan(arm["predicted_bytes"]):
                told = f"{label}: {STATUS_CELLS[arm['status']]}, predicted"
                axis.axhline(arm["predicted_bytes"] / size, label=told, **across(index))


def across(index: int) -> dict[str, Any]:
    """The look of a line from edge to edge, its markers on the edges."""
    return {**look(index), "clip_on": False}
