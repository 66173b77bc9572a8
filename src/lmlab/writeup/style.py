"""One style for every figure: readable in colour, in grey and by a colour-blind reader.

A series is told apart three times over: by colour (Okabe and Ito's palette, ordered so that
neighbours differ in lightness as well), by marker and by line style. Text is drawn as outlines, so
that an SVG looks the same on a machine without the font; dates and random ids are kept out of the
files, so that the same results give the same bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import matplotlib

matplotlib.use("agg")  # before pyplot: a page is made where there is no display

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import (
    FixedLocator,
    FuncFormatter,
    Locator,
    LogLocator,
    MaxNLocator,
    NullLocator,
    ScalarFormatter,
)

from lmlab.study.config import Study
from lmlab.writeup.numbers import MINUS

# Dark to light and back, so that neighbours in a legend differ in grey too.
COLOURS = ("#0072B2", "#E69F00", "#000000", "#CC79A7", "#009E73", "#D55E00", "#56B4E9", "#7F7F7F")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
LINES: tuple[Any, ...] = ("-", (0, (5, 1.5)), (0, (1, 1)), (0, (4, 1, 1, 1)), (0, (8, 2)))
HATCHES = ("", "///", "...", "xxx", "\\\\\\", "++")
GUIDE = "#8C8C8C"
THOUSAND = 1000

WIDTH_INCHES = 8.6
SETTINGS: dict[str, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "axes.titlesize": 9.5,
    "axes.titleweight": "bold",
    "axes.labelsize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.which": "major",
    "axes.axisbelow": True,
    "grid.color": "#E3E3E3",
    "grid.linewidth": 0.6,
    "lines.linewidth": 1.4,
    "lines.markersize": 5,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "figure.dpi": 100,
    "savefig.dpi": 160,
    "figure.constrained_layout.use": True,
    "svg.hashsalt": "lmlab",
    "svg.fonttype": "path",
    "hatch.linewidth": 0.6,
}


@contextmanager
def house_style() -> Iterator[None]:
    """Matplotlib's own defaults with ours on top, whatever a user's matplotlibrc says."""
    with plt.style.context(["default", SETTINGS]):
        yield


def series(index: int) -> dict[str, Any]:
    """Colour, marker and line of the n-th series."""
    return {
        "color": COLOURS[index % len(COLOURS)],
        "marker": MARKERS[index % len(MARKERS)],
        "linestyle": LINES[index % len(LINES)],
    }


def looks(values: Iterable[Any]) -> dict[Any, dict[str, Any]]:
    """A look for each of several values, in their order."""
    return {value: series(index) for index, value in enumerate(values)}


def size_looks(study: Study) -> dict[Any, dict[str, Any]]:
    """A look for every size that some chapter of the study measures: the same in all of them."""
    measured = {size for block in study.chapters.values() for size in block.get("sizes", ())}
    return looks(size for size in study.sizes_smallest_first() if size in measured)


def panels(rows: int, columns: int, *, height: float, **kwargs: Any) -> tuple[Figure, list[Axes]]:
    """Small multiples of one height each, row by row."""
    figure, axes = plt.subplots(
        rows, columns, figsize=(WIDTH_INCHES, height * rows), squeeze=False, **kwargs
    )
    return figure, [axis for line in axes for axis in line]


def log_axis(axes: Axes, which: Literal["x", "y"], ticks: Sequence[float] | None = None) -> None:
    """A logarithmic axis with plain numbers, once data is drawn; given ticks are the only ones."""
    if which == "x":
        axes.set_xscale("log")
    else:
        axes.set_yscale("log")
    axis = axes.xaxis if which == "x" else axes.yaxis
    low, high = axis.get_view_interval()
    axis.set_major_locator(FixedLocator(list(ticks)) if ticks else _log_ticks(low, high))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: _separated(value)))


def separate_thousands(figure: Figure) -> None:
    """Numbers of linear axes as those of logarithmic ones are written: `1,400`."""
    for axes in figure.axes:
        for axis in (axes.xaxis, axes.yaxis):
            largest = max(map(abs, axis.get_view_interval()))
            plain = type(axis.get_major_formatter()) is ScalarFormatter
            if plain and THOUSAND <= largest < THOUSAND**2:  # larger ones have a factor beside them
                axis.set_major_formatter(FuncFormatter(lambda value, _: _separated(value)))


def _separated(value: float) -> str:
    return f"{value:,.10g}".replace("-", MINUS)


def legend_below(figure: Figure, axis: Axes, title: str | None = None) -> None:
    """One legend for all panels, under them, where it hides nothing."""
    handles, labels = axis.get_legend_handles_labels()
    if handles:
        figure.legend(
            handles, labels, loc="outside lower center", ncols=min(len(labels), 6), title=title
        )


def _log_ticks(low: float, high: float) -> Locator:
    """Powers of ten over many decades, more between them over few, even steps within one."""
    if low <= 0 or high / low > 3000:
        return LogLocator(subs=(1.0,))
    if high / low > 4:
        return LogLocator(subs=(1.0, 3.0) if high / low > 30 else (1.0, 2.0, 5.0))
    return FixedLocator(list(MaxNLocator(5).tick_values(low, high)))
