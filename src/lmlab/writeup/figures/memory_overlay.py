"""Two recordings of a training step over each other: two precisions, and two contexts.

Two steps have different numbers of events, so neither events nor time line them up. Phases do: each
phase is stretched to the same width in both, and within it the curves are compared by how far the
phase has come.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lmlab.writeup import style
from lmlab.writeup.collect import Collected
from lmlab.writeup.figure import Drawing
from lmlab.writeup.frames import memory as frames
from lmlab.writeup.numbers import significant
from lmlab.writeup.tables.memory import caption

PHASE_WIDTHS = {"forward": 2.0, "backward": 3.0, "optimizer": 1.0}
Curve = tuple[str, Mapping[str, Any]]


def overlays(collected: Collected, data: pd.DataFrame) -> dict[str, Drawing]:
    """One figure of two panels: precisions at one context, contexts at one precision."""
    shown = frames.shown_places(data)
    panels = [
        (title, curves)
        for title, curves in (
            ("Two precisions", precisions(collected, shown)),
            ("Two contexts", contexts(collected, data, shown)),
        )
        if len(curves) == 2
    ]
    place = f"{shown[0]['size']}. " if shown else ""
    return {
        "overlay": Drawing(
            alt="Active memory of two training steps over each other, phase by phase",
            caption=f"{place}All active bytes; each phase is drawn equally wide in both steps. "
            f"{caption(collected)}",
            draw=(lambda: _draw(panels)) if panels else None,
        )
    }


def precisions(collected: Collected, shown: Sequence[Mapping[str, Any]]) -> list[Curve]:
    """The first two precisions at the place that pictures are taken at."""
    return [
        (f"{place['precision']}, context {place['context']}", found)
        for place in shown[:2]
        if (found := frames.recorded(collected, place, "train_step")) is not None
    ]


def contexts(
    collected: Collected, data: pd.DataFrame, shown: Sequence[Mapping[str, Any]]
) -> list[Curve]:
    """The shortest and the longest context that the last precision shown has a train step of."""
    if not shown:
        return []
    place = shown[-1]
    steps = frames.measured(frames.of(data, mode="train_step", size=place["size"]))
    here = sorted(frames.of(steps, precision=place["precision"])["context"])
    ends = dict.fromkeys(here[:1] + here[-1:])
    return [
        (f"{place['precision']}, context {context}", found)
        for context in ends
        if (found := frames.recorded(collected, {**place, "context": context}, "train_step"))
        is not None
    ]


def stretched(recorded: Mapping[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """Positions on the common axis, and all active bytes there."""
    events = np.array(recorded["timeline"]["event"], dtype=float)
    totals = np.sum(list(recorded["timeline"]["bytes"].values()), axis=0)
    edges = [recorded["phases"][0]["first_event"]]
    edges += [phase["last_event"] for phase in recorded["phases"]]
    places = np.cumsum([0.0, *(PHASE_WIDTHS[phase["name"]] for phase in recorded["phases"])])
    return np.interp(events, edges, places), totals


def _draw(panels: Sequence[tuple[str, Sequence[Curve]]]) -> Figure:
    figure, axes = style.panels(1, len(panels), height=3.1, sharey=True)
    tallest = max(recorded["replayed_bytes"] for _, curves in panels for _, recorded in curves)
    unit, size = frames.unit_of([tallest])
    for axis, (title, curves) in zip(axes, panels, strict=True):
        for index, (label, recorded) in enumerate(curves):
            x, totals = stretched(recorded)
            colour = style.COLOURS[index]
            peak = f"{label}: peak {significant(recorded['replayed_bytes'] / size, 4)} {unit}"
            look = {"color": colour, "linestyle": style.LINES[index]}
            axis.step(x, totals / size, where="post", label=peak, **look)
            axis.fill_between(x, totals / size, step="post", color=colour, alpha=0.12)
            top = int(np.argmax(totals))
            axis.plot([x[top]], [totals[top] / size], marker="v", color=colour)
        _phases(axis, curves[0][1]["phases"], 1.15 * tallest / size)
        axis.set_title(title)
        axis.set_ylim(0, 1.15 * tallest / size)
        axis.legend(loc="upper center", bbox_to_anchor=(0.5, -0.1), fontsize=8)
    axes[0].set_ylabel(f"Active memory ({unit})")
    return figure


def _phases(axis: Axes, phases: Sequence[Mapping[str, Any]], top: float) -> None:
    start = 0.0
    for number, phase in enumerate(phases):
        width = PHASE_WIDTHS[phase["name"]]
        if number % 2:
            axis.axvspan(start, start + width, color="#F0F0F0", zorder=0, linewidth=0)
        axis.text(start + width / 2, 0.985 * top, phase["name"], ha="center", va="top", fontsize=8)
        start += width
    axis.set_xlim(0, start)
    axis.set_xticks([])
    axis.grid(axis="x", visible=False)
