"""Figures of the memory chapter: what is active when and what for; peaks; strategies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.text import Text

from lmlab.writeup import style
from lmlab.writeup.collect import Collected
from lmlab.writeup.figure import Drawing
from lmlab.writeup.figures.memory_checkpointing import checkpointing
from lmlab.writeup.figures.memory_overlay import overlays
from lmlab.writeup.frames import memory as frames
from lmlab.writeup.frames.memory import CATEGORIES, MODES
from lmlab.writeup.numbers import significant
from lmlab.writeup.tables.memory import caption, in_words

COLOURS = {
    "parameters": "#0072B2",
    "optimizer_state": "#56B4E9",
    "gradients": "#E69F00",
    "weight_copies": "#F0E442",
    "activations": "#009E73",
    "workspace": "#CC79A7",
    "other": "#7F7F7F",
}
PHASE_SHADES = ("#FFFFFF", "#F0F0F0")
HEADROOM = 1.22
"""Above the peak there is room for its label and the names of the phases."""

ABOVE = 1.01
"""Just over a panel, in parts of its height."""

Recorded = Mapping[str, Any]
Phase = Mapping[str, Any]


def figures(collected: Collected) -> dict[str, Drawing]:
    """All figures by name."""
    data = frames.frame(collected)
    shown = frames.shown_places(data)
    return {
        "timeline_forward": _forward(collected, shown),
        "timeline_train_step": _train_step(collected, shown),
        **overlays(collected, data),
        "composition": _composition(collected, data),
        "peak_by_context": _peaks(collected, data),
        **checkpointing(collected),
    }


def _forward(collected: Collected, shown: Sequence[Mapping[str, Any]]) -> Drawing:
    place = shown[0] if shown else {}
    panels = [
        (MODES[mode].capitalize(), found)
        for mode in ("forward", "forward_graph")
        if (found := frames.recorded(collected, place, mode)) is not None
    ]
    return Drawing(
        alt="Active memory during a forward pass without and with its graph, by category",
        caption=_timeline_caption(collected, place),
        draw=(lambda: timelines(panels)) if panels else None,
    )


def _train_step(collected: Collected, shown: Sequence[Mapping[str, Any]]) -> Drawing:
    panels = [
        (f"Training step, {place['precision']}", found)
        for place in shown
        if (found := frames.recorded(collected, place, "train_step")) is not None
    ]
    return Drawing(
        alt="Active memory during a training step, phases shaded, by category",
        caption=_timeline_caption(collected, {**shown[0], "precision": None} if shown else {}),
        draw=(lambda: timelines(panels)) if panels else None,
    )


def _timeline_caption(collected: Collected, place: Mapping[str, Any]) -> str:
    where = ""
    if place:
        where = (
            f"{place['size']} at context {place['context']}. "
            if place["precision"] is None
            else f"{in_words(place)}. "
        )
    return (
        f"{where}Active bytes after each allocation and free, stacked by what they are for; the "
        "peak is marked. Of every bucket of events the lowest and the highest moment are drawn, so "
        f"that no peak is lost. {caption(collected)}"
    )


def timelines(panels: Sequence[tuple[str, Recorded]]) -> Figure:
    """One panel a recording, side by side on one scale."""
    figure, axes = style.panels(1, len(panels), height=3.4, sharey=True)
    tallest = max(recorded["replayed_bytes"] for _, recorded in panels)
    unit, size = frames.unit_of([tallest])
    names: list[dict[Text, Phase]] = []
    for axis, (title, recorded) in zip(axes, panels, strict=True):
        _stack(axis, recorded, size)
        names.append(_phases(axis, recorded["phases"], HEADROOM * tallest / size))
        _mark_peak(axis, recorded, unit, size)
        axis.set_title(title)
        axis.set_xlabel("Allocator events")
        axis.set_ylim(0, HEADROOM * tallest / size)
        axis.grid(axis="x", visible=False)
    axes[0].set_ylabel(f"Active memory ({unit})")
    _legend(figure, [name for _, recorded in panels for name in recorded["timeline"]["bytes"]])
    figure.draw_without_rendering()  # until then nobody knows how wide a panel and a name are
    for axis, here in zip(axes, names, strict=True):
        _lift_wide_names(axis, here)
    return figure


def _stack(axis: Axes, recorded: Recorded, size: int) -> None:
    timeline = recorded["timeline"]
    names = [name for name in CATEGORIES if name in timeline["bytes"]]
    heights = [np.array(timeline["bytes"][name]) / size for name in names]
    axis.stackplot(
        timeline["event"],
        *heights,
        colors=[COLOURS[name] for name in names],
        step="post",
        linewidth=0,
        zorder=2,
    )


def _phases(axis: Axes, phases: Sequence[Phase], top: float) -> dict[Text, Phase]:
    """Shades behind the phases, and their names at the top."""
    end = phases[-1]["last_event"]
    names = {}
    for number, phase in enumerate(phases):
        start, stop = phase["first_event"], phase["last_event"]
        axis.axvspan(start, stop, color=PHASE_SHADES[number % 2], zorder=0, linewidth=0)
        if number:
            axis.axvline(start, color=style.GUIDE, linewidth=0.8, zorder=3)
        middle = (start + stop) / 2
        name = axis.text(middle, 0.985 * top, phase["name"], ha="center", va="top", fontsize=8)
        names[name] = phase
    axis.set_xlim(0, max(end, 1))
    return names


def _lift_wide_names(axis: Axes, names: Mapping[Text, Phase]) -> None:
    """Above the panel, names wider than their phase: inside they would cross its borders."""
    middle = sum(axis.get_xlim()) / 2
    for name, phase in names.items():
        start, stop = phase["first_event"], phase["last_event"]
        left, right = axis.transData.transform([(start, 0), (stop, 0)])[:, 0]
        if name.get_window_extent().width <= right - left:
            continue
        # Flush with the border that is nearer to the edge, so that it grows into the panel.
        edge, side = (stop, "right") if start + stop > 2 * middle else (start, "left")
        name.set(x=edge, y=ABOVE, ha=side, va="bottom", transform=axis.get_xaxis_transform())


def _mark_peak(axis: Axes, recorded: Recorded, unit: str, size: int) -> None:
    event, height = recorded["peak_event"], recorded["replayed_bytes"] / size
    last = recorded["phases"][-1]["last_event"]
    axis.axhline(height, color="black", linewidth=0.7, linestyle=(0, (4, 2)), zorder=3)
    axis.plot([event], [height], marker="v", color="black", markersize=5, zorder=4)
    right = event > 0.6 * last
    axis.annotate(
        f"peak {significant(height, 4)} {unit}",
        (event, height),
        xytext=(-6 if right else 6, 4),
        textcoords="offset points",
        ha="right" if right else "left",
        va="bottom",
        fontsize=8,
    )


def _legend(figure: Figure, names: Sequence[str]) -> None:
    used = [name for name in CATEGORIES if name in set(names)]
    handles = [Patch(facecolor=COLOURS[name], label=CATEGORIES[name]) for name in used]
    figure.legend(handles=handles, loc="outside lower center", ncols=min(len(used), 4))


def _composition(collected: Collected, data: pd.DataFrame) -> Drawing:
    steps = frames.measured(frames.of(data, mode="train_step"))
    return Drawing(
        alt="What the peak of a training step consists of, a bar per size and context",
        caption="Parts of the training step's peak, as shares of it; one bar a context, its number "
        f"below. {caption(collected)}",
        draw=(lambda: _draw_composition(steps)) if len(steps) else None,
    )


def _draw_composition(steps: pd.DataFrame) -> Figure:
    """A panel a precision; bars in groups, a group a size and a bar a context."""
    precisions = frames.order(steps, "precision")
    figure, axes = style.panels(len(precisions), 1, height=2.2, sharey=True)
    for axis, precision in zip(axes, precisions, strict=True):
        rows = frames.of(steps, precision=precision)
        _bars(axis, rows, _bar_positions(rows))
        axis.set_title(precision, loc="left")
        axis.set_ylabel("Share of the peak (%)")
    axes[-1].set_xlabel("Context (tokens), by size")
    _legend(figure, [name for name in CATEGORIES if steps[f"live_{name}"].sum() > 0])
    return figure


def _bar_positions(rows: pd.DataFrame) -> list[float]:
    """One step a bar, and a gap of one between sizes."""
    groups = {size: number for number, size in enumerate(frames.order(rows, "size"))}
    return [number + groups[size] for number, size in enumerate(rows["size"])]


def _bars(axis: Axes, rows: pd.DataFrame, places: Sequence[float]) -> None:
    totals = sum(rows[f"live_{name}"] for name in CATEGORIES)
    below = np.zeros(len(rows))
    for name in CATEGORIES:
        share = (100 * rows[f"live_{name}"] / totals).to_numpy()
        axis.bar(places, share, bottom=below, color=COLOURS[name], width=0.88)
        below = below + share
    for size in frames.order(rows, "size"):
        here = [x for x, name in zip(places, rows["size"], strict=True) if name == size]
        axis.text(sum(here) / len(here), 102, str(size), ha="center", va="bottom", fontsize=8)
    axis.set_xticks(places, [str(context) for context in rows["context"]], fontsize=7)
    axis.set_ylim(0, 100)
    axis.grid(axis="x", visible=False)


def _peaks(collected: Collected, data: pd.DataFrame) -> Drawing:
    rows = frames.measured(data)
    return Drawing(
        alt="Peak memory against context length, a line per size, fp32 and bf16",
        caption="Peak memory against context length; both axes are logarithmic. Full lines are "
        f"{frames.BASE}, dashed lines {frames.LOW}. {caption(collected)}",
        draw=(lambda: _draw_peaks(rows, _capacity(collected), style.size_looks(collected.study)))
        if len(rows)
        else None,
    )


def _capacity(collected: Collected) -> int | None:
    """The device's memory, as the results tell it."""
    for result in collected.results:
        total = (result.data.get("before") or {}).get("device_total_bytes")
        if total is not None:
            return int(total)
    return None


def _draw_peaks(
    rows: pd.DataFrame, capacity: int | None, looks: Mapping[Any, Mapping[str, Any]]
) -> Figure:
    unit, size = frames.unit_of(rows["peak_bytes"])
    figure, axes = style.panels(1, len(MODES), height=3.2, sharey=True)
    contexts = sorted(set(rows["context"]))
    for axis, (mode, title) in zip(axes, MODES.items(), strict=True):
        for name in frames.order(rows, "size"):
            for precision in frames.order(rows, "precision"):
                line = frames.of(rows, mode=mode, size=name, precision=precision)
                dashes = "-" if precision == frames.BASE else (0, (4, 2))
                look = {**looks[name], "linestyle": dashes}
                label = str(name) if precision == frames.BASE else None
                axis.plot(line["context"], line["peak_bytes"] / size, label=label, **look)
        if capacity is not None:
            axis.axhline(capacity / size, color=style.GUIDE, linewidth=0.9)
        axis.set_title(title.capitalize())
        style.log_axis(axis, "x", ticks=contexts)
        axis.set_xticks(contexts, [str(context) for context in contexts])
        axis.set_xlabel("Context (tokens)")
    axes[0].set_ylabel(f"Peak memory ({unit})")
    style.log_axis(axes[0], "y")
    if capacity is not None:
        axes[0].text(contexts[0], capacity / size, "the GPU's memory", va="bottom", fontsize=7.5)
    style.legend_below(figure, axes[0], title="Size")
    return figure
