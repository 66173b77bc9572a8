"""The shape that others publish: every variant there, and who published what."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd

from lmlab.writeup.collect import Collected, sources_of
from lmlab.writeup.frames import attention as frames
from lmlab.writeup.numbers import significant
from lmlab.writeup.references import published_entries, stated
from lmlab.writeup.table import NOTHING, Column, Table
from lmlab.writeup.tables.attention_cells import caption, median_cell, speedup_cell
from lmlab.writeup.tables.attention_race import PASSES, TITLES
from lmlab.writeup.tables.cells import WITHIN_NOISE

COMPILED_ARMS = {"naive": "naive, compiled"}


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
            Column("Ours as fast as it: forward, backward, both"),
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
        "o.sum().backward(). The last column: its time over ours, "
        f"{WITHIN_NOISE} within noise. Published entries are of other machines.",
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
            _ours_against(rows, arm),
        ]
        for arm in both["arm"]
    ]


def _ours_against(rows: pd.DataFrame, arm: str) -> str:
    ratios = frames.against(rows, frames.OURS, arm)
    if arm == frames.OURS or not len(ratios):
        return NOTHING
    return ", ".join(speedup_cell(frames.of(ratios, pass_=name)) for name in PASSES)


def _published(folder: Path, head_dim: int, asked: Any) -> list[list[str]]:
    return [
        [
            str(head_dim),
            f"published: {row['entry']}, {stated(row['gpu'])}",
            *[NOTHING] * 2,
            significant(float(row["ms"]), 4),
            *[NOTHING] * 2,
        ]
        for _, row in published_entries(folder, head_dim, asked).iterrows()
    ]
