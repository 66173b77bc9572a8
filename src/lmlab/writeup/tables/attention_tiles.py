"""Tiles of our kernels: time, shared memory and spills of each cut, and why one does not fit."""

from __future__ import annotations

import re
from typing import Any

import pandas as pd

from lmlab.writeup.collect import Collected, sources_of
from lmlab.writeup.frames import attention as frames
from lmlab.writeup.numbers import binary_bytes
from lmlab.writeup.table import NOTHING, Column, Table
from lmlab.writeup.tables.attention_cells import caption, median_cell

CHOSEN = "chosen"
DIRECTIONS = ("forward", "backward")
REQUIRED = re.compile(r"shared memory, Required: (\d+)")
"""How Triton refuses a kernel that asks for more than a program may have."""


def tiles(collected: Collected, data: pd.DataFrame) -> Table | None:
    """Time and shared memory of each cut, forward and backward side by side."""
    rows = frames.of(data, topic="tiles")
    if not len(frames.measured(rows)):
        return None
    used = frames.rows_of(collected, "tiles")
    asked, limit = used[0].point.settings, shared_limit(collected)
    return Table(
        title=f"Tiles of our kernels: {asked['precision']}, causal, {asked['heads']} heads, "
        f"sequence {asked['sequence']:,}",
        columns=[
            Column("Head dim"),
            Column("Kept × walked", "left"),
            Column("Warps"),
            *(
                Column(f"{direction}{what}")
                for direction in map(str.capitalize, DIRECTIONS)
                for what in (" (ms)", ", shared memory", ", spills")
            ),
        ],
        rows=[
            line
            for head_dim in frames.order(rows, "head_dim")
            for arm in frames.order(frames.of(rows, head_dim=head_dim), "arm")
            for line in _lines(frames.of(rows, head_dim=head_dim, arm=arm))
        ],
        caption=f"{caption(used)} Medians; {asked['stages']} walked tiles loaded ahead. Shared "
        f"memory as the compiled kernel takes it; a program may have {binary_bytes(limit)}. "
        "Chosen: what the launch table takes for this problem, as many ahead as it says.",
        sources=sources_of(used),
    )


def shared_limit(collected: Collected) -> int:
    """The most shared memory that a program may have, where some cut was tried."""
    used = [row.result for row in frames.rows_of(collected, "tiles") if row.result is not None]
    return max(int(result.data.get("shared_limit_bytes", 0)) for result in used)


def _lines(here: pd.DataFrame) -> list[list[str]]:
    """One line a cut; two for what is chosen where forward and backward choose differently."""
    cuts = [here[here["pass"] == way] for way in frames.order(here, "pass")]
    names = {cut_name(part.iloc[0]) for part in cuts}
    return [_line(here)] if len(names) == 1 else [_line(part) for part in cuts]


def _line(here: pd.DataFrame) -> list[str]:
    row = here.iloc[0]
    cells = [_direction(frames.of(here, pass_=way)) for way in DIRECTIONS]
    name = cut_name(row)
    name = f"chosen: {name}" if row["arm"] == CHOSEN else name
    return [str(row["head_dim"]), name, _whole(row["warps"]), *cells[0], *cells[1]]


def cut_name(row: pd.Series) -> str:
    """`128 × 64`, or what its arm is called where it was not begun."""
    if row["kept"] is None:
        return str(row["arm"]).replace("x", " × ")
    kind = ", specialised warps" if row["specialised"] else ""
    return f"{row['kept']} × {row['walked']}{kind}"


def needed_bytes(row: pd.Series) -> int | None:
    """Shared memory that a refused cut asks for, by the refusal itself."""
    found = REQUIRED.search(str(row["reason"]))
    return int(found[1]) if found else None


def _direction(part: pd.DataFrame) -> list[str]:
    if not len(part):
        return [NOTHING] * 3
    row = part.iloc[0]
    if row["status"] == "unsupported":
        return ["does not fit", _needs(row), NOTHING]
    shared = binary_bytes(row["shared_bytes"]) if row["shared_bytes"] is not None else NOTHING
    return [median_cell(part), shared, _whole(row["spills"])]


def _needs(row: pd.Series) -> str:
    needed, by_count = needed_bytes(row), row["shared_by_count_bytes"]
    if needed is not None:
        return f"needs {binary_bytes(needed)}"
    return f"about {binary_bytes(by_count)}" if by_count else NOTHING


def _whole(value: Any) -> str:
    return NOTHING if value is None else str(int(value))
