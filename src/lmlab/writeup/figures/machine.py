"""The machine's one figure: measured matmul rates beside the stated peaks."""

from __future__ import annotations

from collections.abc import Mapping

from matplotlib.figure import Figure

from lmlab.writeup import style
from lmlab.writeup.caption import describe
from lmlab.writeup.collect import Collected
from lmlab.writeup.figure import Drawing
from lmlab.writeup.numbers import significant

BAR = 0.38


def figures(collected: Collected) -> dict[str, Drawing]:
    """The ceilings as bars."""
    rows = collected.ceiling("ceilings", "matmul_tflops") or {}
    measured = {name: row["tflops"] for name, row in rows.items() if row["tflops"] is not None}
    peaks = collected.ceiling("peaks", "tflops") or {}
    return {
        "ceilings": Drawing(
            alt="Measured matmul rate of each precision beside the stated peak",
            caption=f"The fastest of several square shapes. {describe(collected.results)}",
            draw=(lambda: _draw(measured, peaks)) if measured else None,
        )
    }


def _draw(measured: Mapping[str, float], peaks: Mapping[str, float]) -> Figure:
    figure, (axis,) = style.panels(1, 1, height=0.9 + 0.45 * len(measured))
    stated = {name: rate for name, rate in peaks.items() if name in measured}
    shown = {"measured": measured, **({"stated peak": stated} if stated else {})}
    names = list(measured)
    for index, (label, rates) in enumerate(shown.items()):
        places = [names.index(name) + (index - (len(shown) - 1) / 2) * BAR for name in rates]
        bars = axis.barh(
            places, list(rates.values()), BAR, label=label, color=style.COLOURS[(0, 6)[index]],
            hatch=style.HATCHES[index], edgecolor="white",
        )  # fmt: skip
        axis.bar_label(bars, [significant(rate) for rate in rates.values()], padding=3, fontsize=8)
    axis.set_yticks(range(len(names)), names)
    axis.invert_yaxis()
    axis.grid(axis="y", visible=False)
    axis.set_xlabel("Matrix products (TFLOP/s)")
    style.legend_below(figure, axis)
    return figure
