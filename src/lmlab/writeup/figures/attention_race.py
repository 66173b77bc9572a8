"""The race of the variants: rates over the sequence, and where ours is faster, as a map."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure

from lmlab.writeup import style
from lmlab.writeup.caption import describe
from lmlab.writeup.collect import Collected
from lmlab.writeup.figure import Drawing
from lmlab.writeup.frames import attention as frames
from lmlab.writeup.frames.race import fastest
from lmlab.writeup.numbers import significant

PASSES = {"forward": "Forward", "backward": "Backward", "both": "Both"}
TILED = "tiled"
BEST = "the best other variant"
SLOWEST, FASTEST = 1 / 8, 8.0
"""Where the colours of the map end; numbers stand in every cell."""


def race_figures(collected: Collected, data: pd.DataFrame) -> dict[str, Drawing]:
    """A figure of lines for each head dimension, and the map."""
    rows = frames.of(data, topic="benchmark")
    timed = frames.measured(rows)
    if not len(rows):
        return {}
    used = frames.rows_of(collected, "benchmark")
    note = describe([row.result for row in used if row.result is not None])
    ours = frames.of(timed, arm=frames.OURS)
    return {
        **{
            f"race_{head_dim}": Drawing(
                alt=f"TFLOP/s against sequence at head dim {head_dim}, a line a variant",
                caption=f"Head dim {head_dim}: operations of the unmasked half over median time; "
                f"higher is faster, both axes are logarithmic. Panels begin at the slowest of "
                f"the variants that do not walk in Python. {note}",
                draw=_lines_of(frames.of(timed, head_dim=head_dim)),
            )
            for head_dim in frames.order(rows, "head_dim")
        },
        **(
            {
                "race_map": Drawing(
                    alt="Speed-up of our attention over others by head dim and sequence",
                    caption="How many times as fast ours is, forward and backward together: "
                    f"purple where it is faster, orange where it is slower. {note}",
                    draw=lambda: _draw_map(timed),
                )
            }
            if len(ours)
            else {}
        ),
    }


def _lines_of(rows: pd.DataFrame) -> Any:
    return (lambda: _draw_lines(rows)) if len(rows) else None


def _draw_lines(rows: pd.DataFrame) -> Figure:
    precisions, arms = frames.order(rows, "precision"), frames.arms_of(rows)
    figure, axes = style.panels(len(precisions), len(PASSES), height=2.6, sharex=True, sharey="row")
    shown = [(precision, name) for precision in precisions for name in PASSES]
    for axis, (precision, name) in zip(axes, shown, strict=True):
        for index, arm in enumerate(arms):
            part = frames.of(rows, precision=precision, arm=arm, pass_=name)
            part = part.sort_values("sequence")
            axis.plot(
                list(part["sequence"]),
                list(part["tflops"]),
                label=frames.label(arm),
                **_look(index, arm),
            )
        axis.set_title(f"{PASSES[name]}, {precision}")
    sequences = sorted(set(rows["sequence"]))
    for axis in axes:
        style.log_axis(axis, "x", ticks=sequences)
        axis.set_xticks(sequences, [_short(value) for value in sequences], rotation=45)
    for axis, precision in zip(axes[:: len(PASSES)], precisions, strict=True):
        axis.set_ylabel("TFLOP/s")
        axis.set_ylim(*_span(frames.of(rows, precision=precision)))
        style.log_axis(axis, "y")
    for axis in axes[-len(PASSES) :]:
        axis.set_xlabel("Sequence (tokens)")
    style.legend_below(figure, axes[0])
    return figure


def _span(rows: pd.DataFrame) -> tuple[float, float]:
    """Where a panel begins and ends: a walk in Python is slower by powers of ten and would flatten
    all the others."""
    others = rows[rows["arm"] != TILED]
    rates = (others if len(others) else rows)["tflops"]
    return 0.8 * float(rates.min()), 1.3 * float(rates.max())


def _look(index: int, arm: str) -> dict[str, Any]:
    """Ours stands out; with nine variants a ninth colour would be the first again."""
    look = {**style.series(index), "markersize": 3.5, "linewidth": 1.1}
    if arm == frames.OURS:
        return {
            **look,
            "color": "#B30000",
            "marker": "o",
            "linestyle": "-",
            "linewidth": 2.2,
            "zorder": 4,
        }
    return look


def _short(sequence: int) -> str:
    return f"{sequence // 1024}k" if sequence >= 1024 and sequence % 1024 == 0 else str(sequence)


def _draw_map(timed: pd.DataFrame) -> Figure:
    both = frames.of(timed, pass_="both")
    precisions = frames.order(frames.of(both, arm=frames.OURS), "precision")
    figure, axes = style.panels(len(precisions), 2, height=2.4)
    shown = [(precision, base) for precision in precisions for base in (frames.NAIVE, BEST)]
    for axis, (precision, base) in zip(axes, shown, strict=True):
        _map(axis, frames.of(both, precision=precision), base)
        axis.set_title(f"Against {base}, {precision}")
    return figure


def ratios(rows: pd.DataFrame, base: str) -> pd.DataFrame:
    """Times of the base over ours, head dimensions down and sequences across."""
    others = fastest(rows, without=[frames.OURS]) if base == BEST else frames.of(rows, arm=base)
    shape = {"index": "head_dim", "columns": "sequence", "values": "median_ms"}
    ours = frames.of(rows, arm=frames.OURS).pivot(**shape)
    return others.pivot(**shape).reindex_like(ours) / ours


def _map(axis: Axes, rows: pd.DataFrame, base: str) -> None:
    table = ratios(rows, base)
    values = table.to_numpy(dtype=float)
    # Orange to purple: told apart by every eye, and light in the middle where nothing is won.
    axis.imshow(values, cmap="PuOr", norm=LogNorm(vmin=SLOWEST, vmax=FASTEST), aspect="auto")
    for (row, column), value in _cells(values):
        text = "–" if math.isnan(value) else significant(value, 2)
        strong = not math.isnan(value) and not 1 / 3.4 < value < 3.4
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
