"""A figure is a declaration: data, x, y, color, facet, mark.

One declaration renders to a PNG for the pages (matplotlib) and to a Vega-Lite specification for the
interactive page, so both always show the same data.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import matplotlib
import numpy as np
import pandas as pd

matplotlib.use("agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from lmlab.report.frame import Results, Rows, select, values_of
from lmlab.report.text import number, plain

Mark = Literal["line", "bar", "stack", "area", "heatmap", "timeline"]

# Colors distinguishable in print and by color-blind readers (Okabe and Ito).
PALETTE = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00"]
PALETTE += ["#56b4e9", "#777777", "#b8a600", "#000000"]
# GitHub shows figures about 900 px wide: at this width 9.5 points are 13 px there.
WIDTH_INCHES, DPI = 9.0, 150
# Legend characters that fit into that width, including keys and gaps.
LEGEND_CHARACTERS = 130
# Lines with more points are drawn without markers.
MANY_POINTS = 100
# A log axis that spans less than this ratio has room for labels at 2 and 5.
FEW_DECADES = 1000
STYLE: Any = {
    "font.size": 9.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.alpha": 0.3,
    "legend.frameon": False,
    "figure.constrained_layout.use": True,
}


@dataclass(frozen=True)
class Axis:
    """A field, by default the measured value, and how it is drawn."""

    title: str
    field: str = "value"
    log: int | None = None  # base of a logarithmic axis
    scale: float = 1.0  # multiplies the values: 1e-3 turns milliseconds into seconds
    categorical: bool = False  # equal steps, in the order of the study
    ticks: Mapping[str, float] | None = None  # labels at given positions instead of numbers


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A declared figure."""

    title: str
    mark: Mark = "line"
    x: Axis
    y: Axis
    color: str | None = None
    facet: str | None = None  # a field with one panel per value, side by side
    facet_title: str = "{}"
    wrap: int | None = None  # panels per row; all in one row unless given
    where: Mapping[str, Any] = field(default_factory=dict)
    data: Callable[[Results], Rows] | None = None  # builds the rows instead of `where`
    x2: str | None = None  # end of a timeline's intervals
    dash: str | None = None  # a field drawn as line style: solid, dashed, dotted
    points: str | None = None  # the value of `dash` drawn as markers: measurements next to a fit
    span: tuple[str, str] | None = None  # fields with the ends of a thin line over each bar
    names: Mapping[str, str] = field(default_factory=dict)  # labels for values of the color field
    share_x: bool = False
    share_y: bool = True
    height: float = 3.4

    def rows(self, results: Results) -> Rows:
        """Rows of the figure's own chapter in axis units; empty if there are none to draw."""
        rows = self.data(results) if self.data else select(results.rows, status="ok", **self.where)
        rows = rows.copy()
        for name, axis in {self.x.field: self.x, self.y.field: self.y, self.x2: self.x}.items():
            if name in rows and not axis.categorical:
                rows[name] = pd.to_numeric(rows[name]) * axis.scale
        return rows

    def colors(self, rows: Rows) -> dict[Any, str]:
        """Assign colors in the order of `names`, so that figures agree, then of appearance."""
        values = values_of(rows, self.color)
        order = list(dict.fromkeys([*self.names, *values]))
        return {value: PALETTE[order.index(value) % len(PALETTE)] for value in values}

    def label(self, value: Any) -> str:
        """The display name of a value of the color field."""
        return str(self.names.get(value, value))

    def draw(self, results: Results, path: Path) -> bool:
        """Write the PNG; return False, without a file, if there is nothing to draw."""
        rows = self.rows(results)
        if rows.empty:
            return False
        path.parent.mkdir(parents=True, exist_ok=True)
        with plt.rc_context(STYLE):
            canvas = self._draw(rows)
            # No matplotlib version in the metadata: the same data gives the same bytes.
            canvas.savefig(path, dpi=DPI, metadata={"Software": None})
            plt.close(canvas)
        return True

    def _draw(self, rows: Rows) -> Canvas:
        facets = groups_of(rows, self.facet)
        columns = self.wrap or len(facets)
        lines = -(-len(facets) // columns)
        size = (WIDTH_INCHES, lines * self.height)
        shared: Any = {"sharex": self.share_x, "sharey": self.share_y, "squeeze": False}
        canvas, grid = plt.subplots(lines, columns, figsize=size, **shared)
        panels: list[Axes] = list(grid.flat)[: len(facets)]
        for unused in list(grid.flat)[len(facets) :]:
            unused.set_visible(False)
        colors = self.colors(rows)
        for axes, (value, mine) in zip(panels, facets, strict=True):
            DRAW[self.mark](self, axes, mine, colors)
            if self.facet:
                axes.set_title(self.facet_title.format(plain(value)), fontsize=10)
        # After all panels are drawn: setting a limit on one ends autoscaling of the shared axis.
        for panel, axes in enumerate(panels):
            self._dress(axes, first=panel % columns == 0 or not self.share_y)
        canvas.suptitle(self.title, fontsize=11)
        handles: dict[str, Any] = {}
        for axes in panels:
            handles |= dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
        if len(handles) > 1:
            fitting = max(1, min(6, LEGEND_CHARACTERS // (8 + max(map(len, handles)))))
            lines = -(-len(handles) // fitting)
            place: Any = {"loc": "outside lower center", "ncols": -(-len(handles) // lines)}
            canvas.legend(handles.values(), handles.keys(), **place)
        return canvas

    def _dress(self, axes: Axes, *, first: bool) -> None:
        axes.set_xlabel(self.x.title)
        if first:
            axes.set_ylabel(self.y.title)
        both = (self.x, axes.set_xscale, axes.xaxis), (self.y, axes.set_yscale, axes.yaxis)
        for axis, setter, drawn in both:
            if axis.log:
                setter("log", base=axis.log)
                low, high = axes.get_ylim()
                if axis is self.y and axis.log == 10 and high / low < FEW_DECADES:
                    drawn.set_major_locator(LogLocator(subs=(1, 2, 5)))
                drawn.set_major_formatter(FuncFormatter(lambda value, _: _tick(value)))
                drawn.set_minor_formatter(NullFormatter())
            elif axis.ticks:
                drawn.set_ticks(list(axis.ticks.values()), labels=list(axis.ticks))
            elif axis is self.y and not axis.categorical and self.mark != "timeline":
                axes.set_ylim(bottom=min(0, axes.get_ylim()[0]))

    def vega(self, results: Results) -> dict[str, Any]:
        """The same figure as a Vega-Lite specification with inlined data."""
        rows = self.rows(results)
        for name in {self.color, self.dash} & {*rows}:
            rows[name] = rows[name].map(lambda value: self.names.get(value, value))
        fields = [self.x.field, self.y.field, self.x2, self.color, self.facet, self.dash]
        used = [name for name in dict.fromkeys(fields) if name]
        nominal = {"type": "nominal", "sort": None}
        shade = {"type": "quantitative", "sort": None} if self.mark == "heatmap" else nominal
        wrapped = {"columns": self.wrap} if self.wrap else {}
        encoding: dict[str, Any] = {
            "x": _channel(self.x, quantitative=self.mark not in ("bar", "stack", "heatmap")),
            "y": _channel(self.y, quantitative=self.mark not in ("heatmap", "timeline")),
            "tooltip": [{"field": name} for name in used],
        }
        for channel, name, more in (
            ("color", self.color, shade),
            ("xOffset", self.color if self.mark == "bar" else None, {"sort": None}),
            ("facet" if self.wrap else "column", self.facet, {**nominal, **wrapped}),
            ("strokeDash", self.dash, {"type": "nominal"}),
            ("x2", self.x2, {}),
        ):
            if name:
                encoding[channel] = {"field": name, **more}
        mark = {"stack": "bar", "heatmap": "rect", "timeline": "bar"}.get(self.mark, self.mark)
        return {
            "title": self.title,
            "data": {"values": rows[used].to_dict("records") if not rows.empty else []},
            "mark": {"type": mark, **({"point": True} if mark == "line" else {})},
            "encoding": encoding,
        }


def _channel(axis: Axis, *, quantitative: bool) -> dict[str, Any]:
    channel: dict[str, Any] = {"field": axis.field, "title": axis.title}
    if axis.categorical or (not quantitative and axis.field != "value"):
        return {**channel, "type": "ordinal", "sort": None}
    if axis.log:
        channel["scale"] = {"type": "log", "base": axis.log}
    if axis.ticks:
        names = {position: label for label, position in axis.ticks.items()}
        label = f"({json.dumps(names)})[datum.value]"
        channel["axis"] = {"values": list(names), "labelExpr": label}
    return {**channel, "type": "quantitative"}


def _tick(value: float) -> str:
    return f"{value:,.0f}" if value >= 1 and value == round(value) else f"{value:.3g}"


def groups_of(rows: Rows, name: str | None) -> list[tuple[Any, Rows]]:
    """The rows grouped by a field; one group, None, if there is no field."""
    return [(v, select(rows, **{name: v}) if name else rows) for v in values_of(rows, name)]


def _line(figure: Figure, axes: Axes, rows: Rows, colors: Mapping[Any, str]) -> None:
    x = figure.x.field
    if figure.x.categorical:
        places = values_of(rows, x)
        rows, x = rows.assign(place=rows[x].map(places.index)), "place"
        axes.set_xticks(range(len(places)), [str(place) for place in places])
    for place, (value, mine) in enumerate(groups_of(rows, figure.color)):
        shape = "osD^"[place % 4] if figure.points else "o"
        lines = groups_of(mine, figure.dash)
        for (dash, line), style in zip(lines, ("-", "--", ":", "-."), strict=False):
            points, few = dash is not None and dash == figure.points, len(line) <= MANY_POINTS
            names = [figure.label(v) for v in (value, dash) if v is not None]
            label = ", ".join(names[:1] if figure.points else names)
            axes.plot(
                line[x].astype(float),
                line[figure.y.field].astype(float),
                color=colors[value],
                linestyle="" if points else style,
                marker=shape if points or (few and not figure.points) else None,
                markersize=4 + 2 * points,
                fillstyle="none" if points else "full",
                label=None if points and len(lines) > 1 else label,
            )


def _area(figure: Figure, axes: Axes, rows: Rows, colors: Mapping[Any, str]) -> None:
    groups = groups_of(rows, figure.color)
    axes.stackplot(
        groups[0][1][figure.x.field].astype(float),
        *(mine[figure.y.field].astype(float) for _, mine in groups),
        labels=[figure.label(value) for value, _ in groups],
        colors=[colors[value] for value, _ in groups],
    )


def _bar(figure: Figure, axes: Axes, rows: Rows, colors: Mapping[Any, str]) -> None:
    """Draw grouped or stacked bars."""
    stacked, groups = figure.mark == "stack", groups_of(rows, figure.color)
    x, y = figure.x.field, figure.y.field
    # Several rows for one bar (machines of the same name): show the highest.
    heights = {value: mine[y].astype(float).groupby(mine[x]).max() for value, mine in groups}
    bars = pd.DataFrame(heights, index=values_of(rows, x)).rename(columns=figure.label)
    shown: Any = {"color": [colors[value] for value in heights], "width": 0.7 if stacked else 0.8}
    bars.plot.bar(ax=axes, stacked=stacked, rot=0, legend=False, **shown)
    if figure.span:
        ends = rows.dropna(subset=list(figure.span))
        low, high = (ends[name].astype(float) * figure.y.scale for name in figure.span)
        axes.vlines(ends[x].map(values_of(rows, x).index), low, high, color="black", linewidth=1.2)


def _heatmap(figure: Figure, axes: Axes, rows: Rows, colors: Mapping[Any, str]) -> None:
    cells = rows.pivot_table("value", figure.y.field, figure.x.field, aggfunc="first", sort=False)
    columns, lines = (values_of(rows, axis.field) for axis in (figure.x, figure.y))
    cells = cells.reindex(index=lines, columns=columns).astype(float)
    axes.imshow(cells, aspect="auto", cmap="viridis")
    darkest, brightest = float(rows["value"].min()), float(rows["value"].max())
    for (y, x), cell in np.ndenumerate(cells.to_numpy()):
        if pd.notna(cell):
            color = "black" if cell > 0.6 * brightest + 0.4 * darkest else "white"
            axes.text(x, y, number(float(cell)), ha="center", va="center", color=color)
    axes.set_xticks(range(len(columns)), map(str, columns))
    axes.set_yticks(range(len(lines)), map(str, lines))
    axes.grid(visible=False)


def _timeline(figure: Figure, axes: Axes, rows: Rows, colors: Mapping[Any, str]) -> None:
    lanes = values_of(rows, figure.y.field)
    for value, mine in groups_of(rows, figure.color):
        for name, here in groups_of(mine, figure.y.field):
            starts = here[figure.x.field].astype(float)
            spans = list(zip(starts, here[str(figure.x2)].astype(float) - starts, strict=True))
            place, label = (lanes.index(name) - 0.4, 0.8), figure.label(value)
            axes.broken_barh(spans, place, color=colors[value], label=label)
    axes.set_yticks(range(len(lanes)), [str(value) for value in lanes])
    axes.set_ylim(len(lanes) - 0.5, -0.5)  # first lane on top, even on a shared axis


DRAW: dict[Mark, Callable[[Figure, Axes, Rows, Mapping[Any, str]], None]] = {
    "line": _line,
    "area": _area,
    "bar": _bar,
    "stack": _bar,
    "heatmap": _heatmap,
    "timeline": _timeline,
}
