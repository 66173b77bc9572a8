"""Naive attention in tables: times and memory of every shape, eager and compiled."""

from __future__ import annotations

import pandas as pd

from lmlab.writeup.collect import Collected, sources_of
from lmlab.writeup.frames import attention as frames
from lmlab.writeup.table import Column, Table
from lmlab.writeup.tables.attention_account import setup
from lmlab.writeup.tables.attention_cells import (
    bytes_cell,
    caption,
    left_out,
    seconds_cell,
    speedup_cell,
    time_cell,
)

PASSES = frames.PASSES["naive"]


def naive(collected: Collected, data: pd.DataFrame) -> Table | None:
    """Eager: times of both passes, and what is held."""
    rows = frames.of(data, topic="naive")
    if not len(rows):
        return None
    used = frames.rows_of(collected, "naive")
    return Table(
        title="Naive attention: mean ± standard deviation (median) in ms, and memory",
        columns=[
            *(Column(title) for title in ("Head dim", "Sequence", "Forward", "Backward")),
            *(Column(title) for title in ("Kept for backward", "Before backward", "Peak")),
        ],
        rows=[_eager(here) for here in _shapes(rows)],
        caption=f"{caption(used)} {setup(used)} Kept for backward: what autograd saves beyond the "
        "inputs. Before backward and peak: memory of the tensors, inputs included."
        f"{left_out(rows, 'shape')}",
        sources=sources_of(used),
    )


def compiled_naive(collected: Collected, data: pd.DataFrame) -> Table | None:
    """Compiled: times, how much faster than eager, and what the first pass costs."""
    rows = frames.of(data, topic="naive")
    if not len(frames.of(rows, arm=frames.COMPILED)):
        return None
    used = frames.rows_of(collected, "naive")
    ratios = frames.against(rows, frames.COMPILED, frames.NAIVE)
    return Table(
        title="Naive attention compiled: mean ± standard deviation (median) in ms, and speed-up",
        columns=[
            *(Column(title) for title in ("Head dim", "Sequence", "Forward", "Speed-up")),
            *(Column(title) for title in ("Backward", "Speed-up", "Peak", "First pass (s)")),
        ],
        rows=[_compiled(here, ratios) for here in _shapes(rows)],
        caption=f"{caption(used)} {setup(used)} Speed-up over eager, in turns in one process. The "
        "first pass compiles forward and backward with empty caches, and loads the compiler where "
        "the process had not loaded it yet."
        f"{left_out(rows, 'shape')}",
        sources=sources_of(used),
    )


def _shapes(rows: pd.DataFrame) -> list[pd.DataFrame]:
    there = frames.known(rows)
    places = dict.fromkeys(there[["head_dim", "sequence"]].itertuples(index=False, name=None))
    return [frames.of(there, head_dim=head_dim, sequence=s) for head_dim, s in places]


def _place(here: pd.DataFrame) -> list[str]:
    row = here.iloc[0]
    return [str(row["head_dim"]), f"{row['sequence']:,}"]


def _eager(here: pd.DataFrame) -> list[str]:
    eager = frames.of(here, arm=frames.NAIVE)
    forward = frames.of(eager, pass_="forward")
    held = ("saved_bytes", "memory_before_backward_bytes", "peak_memory_bytes")
    return [
        *_place(here),
        *(time_cell(frames.of(eager, pass_=name)) for name in PASSES),
        *(bytes_cell(forward, column) for column in held),
    ]


def _compiled(here: pd.DataFrame, ratios: pd.DataFrame) -> list[str]:
    row = here.iloc[0]
    arm = frames.of(here, arm=frames.COMPILED)
    against = frames.of(ratios, head_dim=row["head_dim"], sequence=row["sequence"])
    cells = [
        cell
        for name in PASSES
        for cell in (
            time_cell(frames.of(arm, pass_=name)),
            speedup_cell(frames.of(against, pass_=name)),
        )
    ]
    forward = frames.of(arm, pass_="forward")
    peak = bytes_cell(forward, "peak_memory_bytes")
    return [*_place(here), *cells, peak, seconds_cell(forward, "first_call_s")]
