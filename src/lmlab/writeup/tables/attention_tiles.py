"""Tiles of our kernels, and the shape that others publish."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd

from lmlab.writeup.collect import Collected, sources_of
from lmlab.writeup.frames import attention as frames
from lmlab.writeup.numbers import binary_bytes, significant
from lmlab.writeup.references import stated
from lmlab.writeup.table import NOTHING, Column, Table
from lmlab.writeup.tables.attention_cells import caption, median_cell
from lmlab.writeup.tables.attention_race import PASSES, TITLES

CHOSEN = "chosen"
COMPILED_ARMS = {"naive": "naive, compiled"}


def tiles(collected: Collected, data: pd.DataFrame) -> Table | None:
    """Time and shared memory of each cut, forward and backward side by side."""
    rows = frames.of(data, topic="tiles")
    if not len(frames.measured(rows)):
        return None
    used = frames.rows_of(collected, "tiles")
    limit = max(row.result.data["shared_limit_bytes"] for row in used if row.result is not None)
    asked = used[0].point.settings
    return Table(
        title=f"Tiles of our kernels: {asked['precision']}, causal, {asked['heads']} heads, "
        f"sequence {asked['sequence']:,}",
        columns=[
            Column("Head dim"),
            Column("Kept × walked", "left"),
            Column("Warps"),
            *(
                Column(f"{direction}{what}")
                for direction in ("Forward", "Backward")
                for what in (" (ms)", ", shared memory", ", spills")
            ),
        ],
        rows=[
            _cut(frames.of(rows, head_dim=head_dim, arm=arm), head_dim, arm)
            for head_dim in frames.order(rows, "head_dim")
            for arm in frames.order(frames.of(rows, head_dim=head_dim), "arm")
        ],
        caption=f"{caption(used)} Medians; {asked['stages']} walked tiles loaded ahead. Shared "
        f"memory as the compiled kernel takes it; a program may have {binary_bytes(limit)}. "
        "Chosen: what the launch table takes for this problem.",
        sources=sources_of(used),
    )


def _cut(here: pd.DataFrame, head_dim: int, arm: str) -> list[str]:
    row = here.iloc[0]
    shape = f"{row['kept']} × {row['walked']}" if row["kept"] is not None else arm
    kind = ", specialised warps" if row["specialised"] else ""
    name = f"chosen: {shape}{kind}" if arm == CHOSEN else shape
    cells = [_direction(frames.of(here, pass_=way)) for way in ("forward", "backward")]
    return [str(head_dim), name, _whole(row["warps"]), *cells[0], *cells[1]]


def _direction(part: pd.DataFrame) -> list[str]:
    if not len(part):
        return [NOTHING] * 3
    row = part.iloc[0]
    if row["status"] == "unsupported":
        needs = row["shared_by_count_bytes"]
        return ["does not fit", f"about {binary_bytes(needs)}" if needs else NOTHING, NOTHING]
    shared = binary_bytes(row["shared_bytes"]) if row["shared_bytes"] is not None else NOTHING
    return [median_cell(part), shared, _whole(row["spills"])]


def _whole(value: Any) -> str:
    return NOTHING if value is None else str(int(value))


def leaderboard(collected: Collected, data: pd.DataFrame) -> Table | None:
    """Every variant at the published shape, the fastest first, and who published what."""
    rows = frames.of(data, topic="leaderboard")
    if not len(frames.measured(rows)):
        return None
    used = frames.rows_of(collected, "leaderboard")
    asked = used[0].point.settings
    return Table(
        title=f"The published shape: batch {asked['batch']}, {asked['heads']} heads, sequence "
        f"{asked['sequence']:,}, {asked['precision']}, causal; median time in ms",
        columns=[
            Column("Head dim"),
            Column("Attention", "left"),
            *(Column(TITLES[name]) for name in PASSES),
            Column("TFLOP/s, both"),
        ],
        rows=[
            line
            for head_dim in frames.order(rows, "head_dim")
            for line in [
                *_board(frames.of(rows, head_dim=head_dim), head_dim),
                *_published(collected.references, head_dim, asked),
            ]
        ],
        caption=f"{caption(used)} Through torch.compile; forward and backward is "
        "o.sum().backward(). Published entries are of other machines.",
        sources=[*sources_of(used), "report/references/leaderboard.csv"],
    )


def _board(rows: pd.DataFrame, head_dim: int) -> list[list[str]]:
    both = frames.of(rows, pass_="both").sort_values("median_ms", na_position="last")
    return [
        [
            str(head_dim),
            COMPILED_ARMS.get(arm, frames.label(arm)),
            *(median_cell(frames.of(rows, arm=arm, pass_=name)) for name in PASSES),
            median_cell(frames.of(rows, arm=arm, pass_="both"), "tflops"),
        ]
        for arm in both["arm"]
    ]


def published_entries(folder: Path, head_dim: int, asked: Any) -> pd.DataFrame:
    """Entries of the same shape; none where the file is not there."""
    file = folder / "leaderboard.csv"
    if not file.exists():
        return pd.DataFrame(columns=["gpu", "entry", "ms"])
    rows = pd.read_csv(file, dtype=str, keep_default_na=False)
    shape = {"head_dim": head_dim, "heads": asked["heads"], "sequence": asked["sequence"]}
    for column, value in shape.items():
        rows = rows[rows[column] == str(value)]
    return rows[rows["precision"] == asked["precision"]]


def _published(folder: Path, head_dim: int, asked: Any) -> list[list[str]]:
    return [
        [
            str(head_dim),
            f"published: {row['entry']}, {stated(row['gpu'])}",
            *[NOTHING] * 2,
            significant(float(row["ms"]), 4),
            NOTHING,
        ]
        for _, row in published_entries(folder, head_dim, asked).iterrows()
    ]
