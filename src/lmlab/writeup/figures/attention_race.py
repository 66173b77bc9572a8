"""The race of the variants: rates over the sequence, and where ours is faster, as a map."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure

from lmlab.writeup import style
from lmlab.writeup.caption import describe
from lmlab.writeup.collect import Collected
from lmlab.writeup.figure import Drawing
from lmlab.writeup.figures import attention_lines as lines
from lmlab.writeup.frames import attention as frames
from lmlab.writeup.frames.race import beside, fastest
from lmlab.writeup.numbers import fixed, significant
from lmlab.writeup.tables.cells import WITHIN_NOISE

PASSES = {"forward": "Forward", "backward": "Backward", "both": "Both"}
TILED = "tiled"
BEST = "the best other variant"
SLOWEST, FASTEST = 1 / 8, 8.0
"""Where the colours of the map end; numbers stand in every cell."""
NEITHER = 1.0
"""What is as fast as ours has the colour of the middle."""
EMPTY = {"failed": "failed", "oom": "OOM"}


def race_figures(collected: Collected, data: pd.DataFrame) -> dict[str, Drawing]:
    """A figure of lines for each head dimension, and the map."""
    rows = frames.of(data, topic="benchmark")
    if not len(rows):
        return {}
    used = frames.rows_of(collected, "benchmark")
    note = describe([row.result for row in used if row.result is not None])
    ours = frames.measured(frames.of(rows, arm=frames.OURS))
    limits = {
        precision: collected.ceiling("ceilings", "matmul_tflops", precision, "tflops")
        for precision in frames.order(rows, "precision")
    }
    limit = " The grey line is the measured matmul rate" if any(limits.values()) else ""
    if limit:
        limit += ", in fp32 that of plain products and no bound." if "fp32" in limits else "."
    return {
        **{
            f"race_{head_dim}": Drawing(
                alt=f"TFLOP/s against sequence at head dim {head_dim}, a line a variant",
                caption=f"Head dim {head_dim}: operations of the unmasked half over median time; "
                "higher is faster, both axes are logarithmic. A line is broken where a sequence "
                f"has no time; what lies below a panel is slower than it shows.{limit} {note}",
                draw=_lines_of(frames.of(rows, head_dim=head_dim), limits),
            )
            for head_dim in frames.order(rows, "head_dim")
        },
        **(
            {
                "race_map": Drawing(
                    alt="Speed-up of our attention over others by head dim and sequence",
                    caption="How many times as fast ours is, forward and backward together: "
                    f"purple where it is faster, orange where it is slower, as dark as it gets "
                    f"from {FASTEST:g} times on; {WITHIN_NOISE} and without colour where the two "
                    "are not told apart, – where one of the two was not measured or has no time. "
                    f"{note}",
                    draw=lambda: _draw_map(rows),
                )
            }
            if len(ours)
            else {}
        ),
    }


def _lines_of(rows: pd.DataFrame, limits: Mapping[str, float | None]) -> Any:
    return (lambda: _draw_lines(rows, limits)) if len(frames.measured(rows)) else None


def _draw_lines(rows: pd.DataFrame, limits: Mapping[str, float | None]) -> Figure:
    timed = frames.measured(rows)
    precisions, arms = frames.order(timed, "precision"), frames.arms_of(timed)
    figure, axes = style.panels(len(precisions), len(PASSES), height=3.1, sharex=True, sharey="row")
    shown = [(precision, name) for precision in precisions for name in PASSES]
    sequences = sorted(set(rows["sequence"]))
    for axis, (precision, name) in zip(axes, shown, strict=True):
        for arm in arms:
            part = frames.of(timed, precision=precision, arm=arm, pass_=name)
            looks = {"linewidth": 1.1, **lines.look(arm), "markersize": 3.5}
            lines.draw(axis, part, ("sequence", "tflops"), sequences, frames.label(arm), **looks)
        if limit := limits[precision]:
            axis.axhline(limit, color=style.GUIDE, linewidth=0.9, label="_limit")
        axis.set_title(f"{PASSES[name]}, {precision}")
    for axis in axes:
        style.log_axis(axis, "x", ticks=sequences)
        axis.set_xticks(sequences, [_short(value) for value in sequences], rotation=45)
    for axis, precision in zip(axes[:: len(PASSES)], precisions, strict=True):
        axis.set_ylabel("TFLOP/s")
        axis.set_ylim(*_span(frames.of(timed, precision=precision), limits[precision] or 0.0))
        style.log_axis(axis, "y")
    for axis in axes[-len(PASSES) :]:
        axis.set_xlabel("Sequence (tokens)")
    style.legend_below(figure, axes[0])
    return figure


def _span(rows: pd.DataFrame, limit: float) -> tuple[float, float]:
    """Where a panel begins and ends: a walk in Python is slower by powers of ten and would flatten
    all the others."""
    others = rows[rows["arm"] != TILED]
    rates = (others if len(others) else rows)["tflops"]
    return 0.8 * float(rates.min()), 1.3 * max(float(rates.max()), limit)


def _short(sequence: int) -> str:
    return f"{sequence // 1024}k" if sequence >= 1024 and sequence % 1024 == 0 else str(sequence)


def _draw_map(rows: pd.DataFrame) -> Figure:
    both = frames.of(rows, pass_="both")
    ours = frames.of(both, arm=frames.OURS)
    precisions = frames.order(frames.measured(ours), "precision")
    figure, axes = style.panels(len(precisions), 2, height=2.4)
    shown = [(precision, base) for precision in precisions for base in (frames.NAIVE, BEST)]
    for axis, (precision, base) in zip(axes, shown, strict=True):
        _map(axis, frames.of(both, precision=precision), base)
        axis.set_title(f"Against {base}, {precision}")
    return figure


def ratios(rows: pd.DataFrame, base: str) -> pd.DataFrame:
    """Times of the base over ours, head dimensions down and sequences across."""
    others = fastest(rows, without=[frames.OURS]) if base == BEST else frames.of(rows, arm=base)
    ours = _grid(frames.of(rows, arm=frames.OURS), "median_ms")
    return _grid(others, "median_ms").reindex_like(ours) / ours


def _grid(rows: pd.DataFrame, values: str) -> pd.DataFrame:
    return rows.pivot(index="head_dim", columns="sequence", values=values)


def within_noise(rows: pd.DataFrame, base: str) -> pd.DataFrame:
    """Whether ours and the base are not told apart, cell by cell of their ratios."""
    grid = ratios(rows, base)
    found = beside(rows, frames.OURS)
    if base != BEST:
        found = found[found["other"] == base]
    if not len(found):
        return pd.DataFrame(False, index=grid.index, columns=grid.columns)
    best = found.loc[found.groupby(["head_dim", "sequence"], sort=False)["median_ms_a"].idxmin()]
    return (_grid(best, "verdict") == "same").reindex_like(grid).eq(True)


def _cell_text(ratio: float, ours: str, *, noise: bool) -> str:
    """The ratio; without one, what happened to ours, or that the other has no time."""
    if math.isnan(ratio):
        return EMPTY.get(ours, "–")
    text = fixed(ratio, 2) if ratio < 10 else significant(ratio)
    return f"{WITHIN_NOISE} {text}" if noise else text


def _map(axis: Axes, rows: pd.DataFrame, base: str) -> None:
    table = ratios(rows, base)
    happened = _grid(frames.of(rows, arm=frames.OURS), "status").to_numpy()
    values = table.to_numpy(dtype=float)
    noise = within_noise(rows, base).to_numpy(dtype=bool)
    shades = np.where(noise, NEITHER, values)
    # Orange to purple: told apart by every eye, and light in the middle where nothing is won.
    axis.imshow(shades, cmap="PuOr", norm=LogNorm(vmin=SLOWEST, vmax=FASTEST), aspect="auto")
    for (row, column), value in _cells(values):
        text = _cell_text(value, str(happened[row, column]), noise=noise[row, column])
        shade = shades[row, column]
        strong = not math.isnan(shade) and not 1 / 3.4 < shade < 3.4
        axis.text(
            column, row, text, ha="center", va="center", fontsize=6.5,
            color="white" if strong else "black",
        )  # fmt: skip
    axis.set_xticks(range(len(table.columns)), [_short(int(s)) for s in table.columns])
    axis.set_yticks(range(len(table.index)), [str(d) for d in table.index])
    axis.tick_params(axis="x", labelsize=6.5)
    axis.grid(visible=False)
    axis.set_xlabel("Sequence (tokens)")
    axis.set_ylabel("Head dim")


def _cells(values: Any) -> Sequence[tuple[tuple[int, int], float]]:
    rows, columns = values.shape
    return [((i, j), float(values[i, j])) for i in range(rows) for j in range(columns)]
