"""Tables of the memory chapter: peaks, their parts, what was largest, layers, predictions."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pandas as pd

from lmlab.study.results import Result
from lmlab.writeup.caption import describe, with_reasons
from lmlab.writeup.collect import Collected, Row, sources_of
from lmlab.writeup.frames import memory as frames
from lmlab.writeup.frames.memory import CATEGORIES, MODES
from lmlab.writeup.numbers import binary_bytes, deviation, percent, significant
from lmlab.writeup.table import NOTHING, STATUS_CELLS, Column, Table
from lmlab.writeup.tables.memory_checkpointing import checkpointing
from lmlab.writeup.tables.memory_layers import layers
from lmlab.writeup.tables.memory_published import published, too_large

NO_PREDICTION = "no prediction"
PLACE_COLUMNS = [Column("Size", "left"), Column("Context")]


def tables(collected: Collected) -> dict[str, Table]:
    """All tables by name."""
    data = frames.frame(collected)
    shown = frames.shown_places(data)
    return {
        "peaks": peaks(collected, data),
        **out_of_memory(collected, data),
        **({"shares": shares(collected, data)} if len(frames.measured(data)) else {}),
        **{f"largest_{p['precision']}": largest(collected, p) for p in shown},
        **{f"lines_{p['precision']}": lines(collected, p) for p in shown},
        "stream": stream(collected, data),
        **layers(collected, data, shown),
        **({"replay": replay(collected, data)} if collected.device == "cuda" else {}),
        "prediction": prediction(collected, data),
        **published(collected, data),
        **too_large(collected, data),
        **checkpointing(collected),
    }


def peaks(collected: Collected, data: pd.DataFrame) -> Table:
    """Peak memory of every place, a column a mode and precision."""
    unit, size = frames.unit_of(data["peak_bytes"])
    return by_place(
        collected,
        data,
        title=f"Peak memory ({unit})",
        cell=lambda row: significant(row["peak_bytes"] / size, 4),
        note=f"{peak_note(collected)} The graph-keeping forward pass is the one that publications "
        "call forward.",
    )


def replay(collected: Collected, data: pd.DataFrame) -> Table:
    """The replayed peak of every train step beside the allocator's own."""
    steps = frames.of(data, mode="train_step")
    unit, size = frames.unit_of(steps["replayed_bytes"])
    precisions = frames.order(steps, "precision")

    def cells(row: pd.Series) -> list[str]:
        if math.isnan(row["replayed_bytes"]):
            return [status_cell(row)] * 3
        replayed = significant(row["replayed_bytes"] / size, 4)
        allocated = row["allocated_bytes"]
        return [
            replayed,
            significant(allocated / size, 4),
            deviation(row["replayed_bytes"] / allocated - 1),
        ]

    titles = ("replayed", "allocator", "difference")
    return Table(
        title=f"The training step's peak twice: replayed, and max_memory_allocated ({unit})",
        columns=[*PLACE_COLUMNS, *(Column(f"{t}, {p}") for p in precisions for t in titles)],
        rows=[
            [*place, *(cell for row in here for cell in cells(row))]
            for place, here in places(steps, precisions)
        ],
        caption=f"{grid_caption(collected)} The allocator counts blocks, which are larger than "
        "what was asked for; the replay cuts them by the allocator's own rule.",
        sources=sources_of(frames.rows_of(collected, frames.TIMELINE)),
    )


def prediction(collected: Collected, data: pd.DataFrame) -> Table:
    """The cost model's peak with its error, a column a mode and precision."""
    unit, size = frames.unit_of(data["predicted_bytes"])

    def cell(row: pd.Series) -> str:
        if math.isnan(row["predicted_bytes"]):
            return NO_PREDICTION
        return f"{significant(row['predicted_bytes'] / size, 4)} ({deviation(row['error'])})"

    return by_place(
        collected,
        data,
        title=f"Predicted peak ({unit}) and its error against the measured one",
        cell=cell,
        note="The prediction counts tensors; what the allocator rounds and what libraries keep for "
        "themselves comes on top.",
    )


def shares(collected: Collected, data: pd.DataFrame) -> Table:
    """What the peak consists of, for the largest size."""
    shown = frames.shown_size(frames.measured(data))
    rows = frames.of(data, size=shown)
    used = [name for name in CATEGORIES if rows[f"live_{name}"].sum() > 0]
    body = []
    for _, row in rows.iterrows():
        start = [MODES[row["mode"]], str(row["context"]), str(row["precision"])]
        body.append([*start, *_share_cells(row, used)])
    return Table(
        title=f"What the peak of {shown} consists of",
        columns=[
            Column("Mode", "left"),
            Column("Context"),
            Column("Precision", "left"),
            *(Column(CATEGORIES[name].capitalize()) for name in used),
        ],
        rows=sorted(body, key=lambda cells: list(MODES.values()).index(cells[0])),
        caption=f"{grid_caption(collected)} Shares of the replayed peak. Workspace: what a phase "
        "makes and gives back, gradients of activations among it, and what libraries keep.",
        sources=sources_of(
            row
            for row in frames.rows_of(collected, frames.TIMELINE)
            if row.point.parameters["size"] == shown
        ),
    )


def out_of_memory(collected: Collected, data: pd.DataFrame) -> dict[str, Table]:
    """What was live where memory ran out, and what was asked for on top; nothing if all fit."""
    failed = data[data["status"] == "oom"]
    told = failed[failed["live_parameters"].notna()]
    if not len(told):
        return {}
    used = [name for name in CATEGORIES if told[f"live_{name}"].sum() > 0]
    rows = [
        [
            MODES[row["mode"]],
            *(str(row[key]) for key in frames.PLACE),
            "not told" if math.isnan(row["asked_bytes"]) else binary_bytes(row["asked_bytes"]),
            binary_bytes(sum(row[f"live_{name}"] for name in CATEGORIES)),
            *(binary_bytes(row[f"live_{name}"]) for name in used),
        ]
        for _, row in told.iterrows()
    ]
    return {
        "out_of_memory": Table(
            title="Where memory ran out: what was asked for, and what was live",
            columns=[
                Column("Mode", "left"),
                *(Column(title, "left") for title in ("Size", "Context", "Precision")),
                Column("Asked for"),
                Column("Live"),
                *(Column(CATEGORIES[name].capitalize()) for name in used),
            ],
            rows=rows,
            caption=f"{caption(collected)} The snapshots of these are kept under snapshots/.",
            sources=sources_of(frames.rows_of(collected, frames.TIMELINE)),
        )
    }


def _share_cells(row: pd.Series, names: Sequence[str]) -> list[str]:
    if row["status"] != "ok":
        return [status_cell(row)] * len(names)
    total = sum(row[f"live_{name}"] for name in CATEGORIES)
    return [_share(row[f"live_{name}"] / total) for name in names]


def _share(share: float) -> str:
    if share == 0:
        return "0"
    return "< 0.1 %" if share < 0.001 else percent(share, 3 if share >= 0.1 else 2)


def stream(collected: Collected, data: pd.DataFrame) -> Table:
    """One tensor of the residual stream: derived from the shape, and found in the recording."""
    steps = frames.of(data, mode="train_step")
    precisions = frames.order(steps, "precision")
    rows = []
    for place, here in places(steps, precisions):
        known = [row["stream_bytes"] for row in here if not pd.isna(row["stream_bytes"])]
        derived = binary_bytes(known[0]) if known else NOTHING
        rows.append([*place, derived, *(_found(row) for row in here)])
    return Table(
        title="One tensor of the residual stream, derived and found",
        columns=[
            *PLACE_COLUMNS,
            Column("Batch × context × d_model × 4 bytes"),
            *(Column(f"allocated / live at the peak, {p}") for p in precisions),
        ],
        rows=rows,
        caption=f"{grid_caption(collected)} Allocations of exactly that many bytes in one training "
        "step; other tensors may happen to be as large.",
        sources=sources_of(frames.rows_of(collected, frames.TIMELINE)),
    )


def _found(row: pd.Series) -> str:
    if math.isnan(row["stream_allocated"]):
        return status_cell(row)
    return f"{row['stream_allocated']:,.0f} / {row['stream_live']:,.0f}"


def largest(collected: Collected, place: Mapping[str, Any]) -> Table:
    """The largest allocations that are live at a train step's peak."""
    mode = frames.recorded(collected, place, "train_step") or {}
    rows = [
        [
            binary_bytes(row["each_bytes"]),
            f"{row['count']:,}",
            binary_bytes(row["bytes"]),
            CATEGORIES[row["category"]],
            row["what"] or f"made in {row['phase']}",
            _line(row),
        ]
        for row in mode.get("live_largest", ())
    ]
    return Table(
        title=f"Largest allocations at the peak: {in_words(place)}",
        columns=[
            Column("Each"),
            Column("Count"),
            Column("Together"),
            Column("Category", "left"),
            Column("What it is", "left"),
            Column("Line", "left"),
        ],
        rows=rows,
        caption=f"{caption(collected)} Of the training step. Equal ones share a row; a star stands "
        "for the number of a layer.",
        sources=sources_of(_at(collected, place)),
    )


def lines(collected: Collected, place: Mapping[str, Any]) -> Table:
    """Live bytes at the peak by the line of code that asked for them."""
    mode = frames.recorded(collected, place, "train_step") or {}
    total = mode.get("replayed_bytes", 0)
    rows = [
        [
            _line(row),
            CATEGORIES[row["category"]],
            f"{row['count']:,}",
            binary_bytes(row["bytes"]),
            percent(row["bytes"] / total, 3),
        ]
        for row in mode.get("live_lines", ())
    ]
    return Table(
        title=f"Live bytes at the peak by line: {in_words(place)}",
        columns=[
            Column("Line", "left"),
            Column("Category", "left"),
            Column("Pieces"),
            Column("Bytes"),
            Column("Of the peak"),
        ],
        rows=rows,
        caption=f"{caption(collected)} Of the training step. What backward makes is asked for by "
        "autograd, where no line of the program is running.",
        sources=sources_of(_at(collected, place)),
    )


def _line(row: Mapping[str, Any]) -> str:
    if row["file"] is None:
        return "before the step" if row["phase"] == "before" else f"{row['phase']}, no line"
    return f"{row['file']}:{row['line']} {row['function']}"


def by_place(
    collected: Collected,
    data: pd.DataFrame,
    *,
    title: str,
    cell: Callable[[pd.Series], str],
    note: str,
) -> Table:
    """A table with a row a size and context and a column a mode and precision."""
    precisions = frames.order(data, "precision")
    parts = {mode: dict(places(frames.of(data, mode=mode), precisions)) for mode in MODES}
    keys = list(parts["forward"])
    return Table(
        title=title,
        columns=[
            *PLACE_COLUMNS,
            *(Column(f"{MODES[m].capitalize()}, {p}") for m in MODES for p in precisions),
        ],
        rows=[
            [
                *key,
                *(
                    cell(row) if row["status"] == "ok" else status_cell(row)
                    for mode in MODES
                    for row in parts[mode][key]
                ),
            ]
            for key in keys
        ],
        caption=f"{grid_caption(collected)} {note}",
        sources=sources_of(frames.rows_of(collected, frames.TIMELINE)),
    )


def places(
    data: pd.DataFrame, precisions: Sequence[str]
) -> list[tuple[tuple[str, str], list[pd.Series]]]:
    """Size and context with the rows of every precision, in the study's order."""
    return [
        (
            (str(size), str(context)),
            [frames.of(part, precision=precision).iloc[0] for precision in precisions],
        )
        for (size, context), part in data.groupby(["size", "context"], sort=False)
    ]


def status_cell(row: pd.Series) -> str:
    """Why there is no number."""
    return STATUS_CELLS[row["status"]]


def caption(collected: Collected) -> str:
    """Device and settings of the grid's results."""
    return describe(_grid(collected))


def grid_caption(collected: Collected) -> str:
    """The same for a table of the whole grid, whose cells may be unsupported."""
    return with_reasons(caption(collected), _grid(collected))


def _grid(collected: Collected) -> list[Result]:
    rows = frames.rows_of(collected, frames.TIMELINE)
    return [row.result for row in rows if row.result is not None]


def peak_note(collected: Collected) -> str:
    """What a peak is here."""
    if collected.device == "cuda":
        return "max_memory_allocated of one step, the allocator emptied before it."
    return "Replayed from the profiler's memory events: a CPU keeps no counter."


def in_words(place: Mapping[str, Any]) -> str:
    """`2.7b at context 1024, bf16`."""
    return f"{place['size']} at context {place['context']}, {place['precision']}"


def _at(collected: Collected, place: Mapping[str, Any]) -> list[Row]:
    return [
        row
        for row in frames.rows_of(collected, frames.TIMELINE)
        if all(row.point.parameters[key] == value for key, value in place.items())
    ]
