"""Figures of the end-to-end chapter: how time grows, how a process warms up, what bf16 buys."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lmlab.writeup import style
from lmlab.writeup.caption import describe
from lmlab.writeup.collect import Collected
from lmlab.writeup.figure import Drawing
from lmlab.writeup.frames import end_to_end as frames
from lmlab.writeup.frames.cold_start import TOLERANCE, traces
from lmlab.writeup.frames.speedup import BASE, PHASES, compared_precisions, speedups
from lmlab.writeup.numbers import percent

# Processes of one size run nearly the same curve; side by side they can all be seen.
DODGE = 0.16
Looks = Mapping[Any, Mapping[str, Any]]
PHASES_SHOWN = frames.PHASES_OF_MODE["train_step"]


def figures(collected: Collected) -> dict[str, Drawing]:
    """All figures by name."""
    data = frames.frame(collected)
    first_batch = frames.of(data, batch=frames.order(data, "batch")[0]) if len(data) else data
    steps = frames.measured(frames.of(frames.grid(first_batch), mode="train_step"))
    sizes = style.size_looks(collected.study)
    contexts = style.looks(frames.order(steps, "context"))
    note = f"{_caption(collected, first_batch)} Whiskers, where visible, span the quartiles."
    return {
        "time_by_context": Drawing(
            alt="Time of forward, backward and optimizer against context length, a line per size",
            caption=f"Median time against context length; both axes are logarithmic. {note}",
            draw=(lambda: _times(steps, "context", "size", sizes)) if len(steps) else None,
        ),
        "time_by_size": Drawing(
            alt="Time of forward, backward and optimizer against model size, a line per context",
            caption=f"Median time against number of parameters; both axes are logarithmic. {note}",
            draw=(lambda: _times(steps, "parameters", "context", contexts)) if len(steps) else None,
        ),
        **(
            {"host_limit": _host_limit(collected, first_batch)}
            if collected.device == "cuda"
            else {}
        ),
        **_cold_start(collected, data),
        **{
            f"speedup_{precision}": _speedup(collected, data, first_batch, precision)
            for precision in compared_precisions(data)
        },
    }


def _caption(collected: Collected, data: pd.DataFrame) -> str:
    batches = set(data["batch"])
    results = [
        result
        for result in collected.results
        if result.parameters["batch"] in batches and result.parameters["start"] == "warm"
    ]
    return describe(results, columns=["start"])


def _times(steps: pd.DataFrame, x: str, line: str, looks: Looks) -> Figure:
    """Panels of phase against precision; time over `x`, one line a value of `line`."""
    precisions = frames.order(steps, "precision")
    figure, axes = style.panels(
        len(precisions), len(PHASES_SHOWN), height=2.5, sharex=True, sharey=True
    )
    for panel, (precision, phase) in enumerate(
        (precision, phase) for precision in precisions for phase in PHASES_SHOWN
    ):
        here = frames.of(steps, precision=precision, phase=phase)
        for value in frames.order(steps, line):
            _line(axes[panel], frames.of(here, **{line: value}), x, str(value), looks[value])
        axes[panel].set_title(f"{phase.capitalize()}, {precision}")
    _size_axis(axes, steps) if x == "parameters" else _context_axis(axes, steps)
    for axis in axes[:: len(PHASES_SHOWN)]:
        axis.set_ylabel("Time (ms)")
    style.log_axis(axes[0], "y")
    style.legend_below(figure, axes[0], title=line.capitalize())
    return figure


def _line(axis: Axes, rows: pd.DataFrame, x: str, label: str, look: Mapping[str, Any]) -> None:
    rows = rows.sort_values(x)
    whiskers = [rows["median_ms"] - rows["q1_ms"], rows["q3_ms"] - rows["median_ms"]]
    axis.errorbar(rows[x], rows["median_ms"], yerr=whiskers, fmt="none", ecolor=look["color"])
    axis.plot(rows[x], rows["median_ms"], label=label, **look)


def _context_axis(axes: Sequence[Axes], rows: pd.DataFrame) -> None:
    contexts = sorted(set(rows["context"]))
    for axis in axes:
        style.log_axis(axis, "x", ticks=contexts)
        axis.set_xticks(contexts, [str(context) for context in contexts])
    for axis in axes[-len(PHASES_SHOWN) :]:
        axis.set_xlabel("Context (tokens)")


def _size_axis(axes: Sequence[Axes], rows: pd.DataFrame, last: int = len(PHASES_SHOWN)) -> None:
    """Sizes stand where their parameter count puts them, and are called by their names."""
    sizes = rows.drop_duplicates("size").sort_values("parameters")
    for axis in axes:
        style.log_axis(axis, "x", ticks=list(sizes["parameters"]))
        axis.set_xticks(list(sizes["parameters"]), list(sizes["size"]), rotation=45, ha="right")
    for axis in axes[-last:]:
        axis.set_xlabel("Size (by parameters)")


def _host_limit(collected: Collected, data: pd.DataFrame) -> Drawing:
    ratios = frames.ratio_of_backward(data)
    ratios = ratios[ratios["busy_share_a"].notna()]
    return Drawing(
        alt="Backward over forward time against the share of forward in which the GPU was busy",
        caption="Each marker is a training step of one size and context; the lines mark backward "
        f"as long as forward and twice as long. {_caption(collected, data)}",
        draw=(lambda: _draw_host_limit(ratios, style.size_looks(collected.study)))
        if len(ratios)
        else None,
    )


def _draw_host_limit(ratios: pd.DataFrame, looks: Looks) -> Figure:
    precisions = frames.order(ratios, "precision")
    figure, axes = style.panels(1, len(precisions), height=2.9, sharex=True, sharey=True)
    for axis, precision in zip(axes, precisions, strict=True):
        for level in (1, 2):
            axis.axhline(level, color=style.GUIDE, linewidth=0.9)
        for size in frames.order(ratios, "size"):
            rows = frames.of(ratios, size=size, precision=precision)
            look = {**looks[size], "linestyle": "none"}
            axis.plot(100 * rows["busy_share_a"], rows["ratio"], label=str(size), **look)
        axis.set_title(precision)
        axis.set_xlabel("GPU busy during forward (%)")
    axes[0].set_ylabel("Backward / forward time")
    axes[0].set_ylim(bottom=0)
    axes[0].set_xlim(0, 105)
    style.legend_below(figure, axes[0], title="Size")
    return figure


def _cold_start(collected: Collected, data: pd.DataFrame) -> dict[str, Drawing]:
    if not len(frames.cold(data)):
        return {}
    rows = traces(data)
    used = [r for r in collected.results if r.parameters["start"] == "cold"]
    return {
        "cold_start": Drawing(
            alt="Step time of fresh processes over their first steps, relative to the settled pace",
            caption="Every step of each cold process as a multiple of its settled median "
            "(logarithmic); open markers are warm-up steps, filled ones were measured, the band is "
            f"± {percent(TOLERANCE, 2)}. {describe(used, columns=['warmup'])}",
            draw=(lambda: _draw_traces(rows)) if len(rows) else None,
        )
    }


def _draw_traces(rows: pd.DataFrame) -> Figure:
    sizes = frames.order(rows, "size")
    columns = min(len(sizes), 5)
    lines = -(-len(sizes) // columns)
    figure, axes = style.panels(lines, columns, height=2.6, sharex=True, sharey=True)
    for axis, size in zip(axes, sizes, strict=False):
        axis.axhspan(1 - TOLERANCE, 1 + TOLERANCE, color="#DDDDDD", zorder=0)
        counts = frames.order(rows, "warmup")
        for index, count in enumerate(counts):
            for _, trace in frames.of(rows, size=size, warmup=count).iterrows():
                _draw_trace(axis, trace, index, shift=DODGE * (index - (len(counts) - 1) / 2))
        axis.set_title(str(size))
        axis.set_xticks([1, *range(5, max(map(len, rows["steps_ms"])) + 1, 5)])
        axis.set_xlabel("Step of the process")
    for axis in axes[len(sizes) :]:
        axis.set_visible(False)
    axes[0].set_ylabel("Step time / settled median")
    style.log_axis(axes[0], "y")
    style.legend_below(figure, axes[0], title="Warm-up steps")
    return figure


def _draw_trace(axis: Axes, trace: pd.Series, index: int, *, shift: float) -> None:
    relative = [ms / trace["settled_ms"] for ms in trace["steps_ms"]]
    steps = [step + shift for step in range(1, len(relative) + 1)]
    look = style.series(index)
    axis.plot(steps, relative, label=str(trace["warmup"]), markersize=3.5, linewidth=0.9, **look)
    unmeasured = int(trace["warmup"])
    _open_markers(axis, steps[:unmeasured], relative[:unmeasured], {**look, "markersize": 3.5})


def _open_markers(
    axis: Axes, x: Sequence[float], y: Sequence[float], look: Mapping[str, Any]
) -> None:
    """A series' own markers, emptied: steps that do not count, differences within noise."""
    axis.plot(
        x,
        y,
        **{**look, "linestyle": "none"},
        markeredgecolor=look["color"],
        markerfacecolor="white",
        zorder=3,
    )


def _speedup(
    collected: Collected, data: pd.DataFrame, shown: pd.DataFrame, precision: str
) -> Drawing:
    """The ratios of the rows shown; what is noise is judged by all."""
    ratios = frames.of(speedups(data, precision), batch=set(shown["batch"]))
    return Drawing(
        alt=f"Speed-up of {precision} over {BASE} against model size, a line per context",
        caption=f"Median time in {BASE} over median time in {precision}, a ratio across points; "
        f"above the line at 1 {precision} is faster. Filled markers are beyond noise, open ones "
        f"within it. {_caption(collected, shown)}",
        draw=(lambda: _draw_speedup(ratios, precision)) if len(ratios) else None,
    )


def _draw_speedup(ratios: pd.DataFrame, precision: str) -> Figure:
    shown = [what for what in PHASES if what != "whole step"]
    ratios = ratios.assign(parameters=ratios["parameters_a"])
    figure, axes = style.panels(1, len(shown), height=2.9, sharex=True, sharey=True)
    for axis, what in zip(axes, shown, strict=True):
        axis.axhline(1, color=style.GUIDE, linewidth=1)
        for index, context in enumerate(frames.order(ratios, "context")):
            rows = frames.of(ratios, what=what, context=context).sort_values("parameters")
            look = style.series(index)
            axis.plot(rows["parameters"], rows["speedup"], label=str(context), **look)
            within = frames.of(rows, verdict="same")
            _open_markers(axis, list(within["parameters"]), list(within["speedup"]), look)
        axis.set_title(what.capitalize())
    _size_axis(axes, ratios, last=len(shown))
    axes[0].set_ylabel(f"Speed-up of {precision} (×)")
    style.log_axis(axes[0], "y")
    style.legend_below(figure, axes[0], title="Context")
    return figure
