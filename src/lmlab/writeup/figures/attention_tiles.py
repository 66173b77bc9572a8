"""Tiles of our kernels as a map: rows that are kept against rows that are walked."""

from __future__ import annotations

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lmlab.writeup import style
from lmlab.writeup.caption import describe
from lmlab.writeup.collect import Collected
from lmlab.writeup.figure import Drawing
from lmlab.writeup.frames import attention as frames
from lmlab.writeup.numbers import binary_bytes, significant
from lmlab.writeup.tables.attention_tiles import CHOSEN, needed_bytes


def tile_figures(collected: Collected, data: pd.DataFrame) -> dict[str, Drawing]:
    """The map; none where no tile was timed, as on a CPU."""
    rows = frames.of(data, topic="tiles")
    timed = frames.measured(rows[rows["arm"] != CHOSEN])
    if not len(timed):
        return {}
    used = [r.result for r in frames.rows_of(collected, "tiles") if r.result is not None]
    return {
        "tiles": Drawing(
            alt="Time of our kernels and their shared memory by the shape of their tiles",
            caption="Median time (darker is faster) and, below it, the shared memory that a "
            "program takes; a cut that the GPU cannot hold is marked. Plain cuts, without what the "
            f"launch table chooses. {describe(used)}",
            draw=lambda: _draw(rows[rows["arm"] != CHOSEN]),
        )
    }


def _draw(rows: pd.DataFrame) -> Figure:
    """A map for each head dimension and direction of which something was timed."""
    known = rows[rows["kept"].notna()]
    timed = frames.measured(known)
    panels = list(dict.fromkeys(timed[["head_dim", "pass"]].itertuples(index=False, name=None)))
    columns = min(2, len(panels))
    figure, axes = style.panels(-(-len(panels) // columns), columns, height=2.9)
    for axis, (head_dim, name) in zip(axes, panels, strict=False):
        _map(axis, frames.of(known, head_dim=head_dim, pass_=name))
        axis.set_title(f"{name.capitalize()}, head dim {head_dim}")
    for axis in axes[len(panels) :]:
        axis.set_visible(False)
    return figure


def _map(axis: Axes, rows: pd.DataFrame) -> None:
    kept, walked = sorted(set(rows["kept"])), sorted(set(rows["walked"]))
    rates = rows.pivot(index="kept", columns="walked", values="tflops").loc[kept, walked]
    axis.imshow(rates.to_numpy(dtype=float), cmap="Blues", vmin=0, aspect="auto", origin="lower")
    fastest = rates.max().max()
    for _, row in rows.iterrows():
        timed = row["tflops"] == row["tflops"]
        axis.text(
            walked.index(row["walked"]), kept.index(row["kept"]), _text(row),
            ha="center", va="center", fontsize=7.5,
            color="white" if timed and row["tflops"] > 0.6 * fastest else "black",
        )  # fmt: skip
    axis.set_xticks(range(len(walked)), [str(height) for height in walked])
    axis.set_yticks(range(len(kept)), [str(height) for height in kept])
    axis.grid(visible=False)
    axis.set_xlabel("Rows walked at a time")
    axis.set_ylabel("Rows kept")


def _text(row: pd.Series) -> str:
    if row["status"] == "unsupported":
        needed = needed_bytes(row)
        return f"does not fit\n{binary_bytes(needed)}" if needed else "does not fit"
    if row["status"] != "ok":
        return str(frames.STATUSES[row["status"]])
    shared = "" if row["shared_bytes"] is None else f"\n{binary_bytes(row['shared_bytes'])}"
    return f"{significant(row['median_ms'])} ms{shared}"
