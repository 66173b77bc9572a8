"""Naive attention in tables: times and memory of every shape, and one shape tensor by tensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from lmlab.writeup.collect import Collected, Row, sources_of
from lmlab.writeup.frames import attention as frames
from lmlab.writeup.numbers import binary_bytes, percent
from lmlab.writeup.table import NOTHING, Column, Table
from lmlab.writeup.tables.attention_cells import bytes_cell, caption, seconds_cell, time_cell


def naive(collected: Collected, data: pd.DataFrame) -> Table | None:
    """Eager and compiled side by side, with what eager holds."""
    rows = frames.of(data, topic="naive")
    if not len(rows):
        return None
    used = frames.rows_of(collected, "naive")
    return Table(
        title="Naive attention, eager and compiled: mean ± standard deviation (median) in ms",
        columns=[
            *(Column(title) for title in ("Head dim", "Sequence", "Forward", "Backward")),
            *(Column(title) for title in ("Before backward", "Peak")),
            *(Column(title) for title in ("Compiled forward", "Compiled backward")),
            Column("First compiled pass (s)"),
        ],
        rows=[
            _shape(frames.of(rows, head_dim=head_dim, sequence=sequence), head_dim, sequence)
            for head_dim, sequence in dict.fromkeys(
                rows[["head_dim", "sequence"]].itertuples(index=False, name=None)
            )
        ],
        caption=f"{caption(used)} {_setup(used)} Before backward and peak: memory of the eager "
        "arm's tensors, inputs included. The first compiled pass compiles forward and backward "
        "with empty caches.",
        sources=sources_of(used),
    )


def _shape(here: pd.DataFrame, head_dim: int, sequence: int) -> list[str]:
    eager, compiled = frames.of(here, arm=frames.NAIVE), frames.of(here, arm=frames.COMPILED)
    forward = frames.of(eager, pass_="forward")
    return [
        str(head_dim),
        f"{sequence:,}",
        time_cell(forward),
        time_cell(frames.of(eager, pass_="backward")),
        bytes_cell(forward, "memory_before_backward_bytes"),
        bytes_cell(forward, "peak_memory_bytes"),
        time_cell(frames.of(compiled, pass_="forward")),
        time_cell(frames.of(compiled, pass_="backward")),
        seconds_cell(frames.of(compiled, pass_="forward"), "first_call_s"),
    ]


def _setup(used: Sequence[Row]) -> str:
    settings = used[0].point.settings
    mask = "causal mask" if settings["causal"] else "no mask"
    return f"Batch {settings['batch']}, no heads, {settings['precision']}, {mask}."


def accounted(collected: Collected) -> Row | None:
    """The smallest shape that did not fit, or else the one with the most scores."""
    rows = [
        row
        for row in frames.rows_of(collected, "naive")
        if row.result is not None and "account" in row.result.data
    ]
    without = [row for row in rows if _arm(row).get("status") == "oom"]
    by_size = sorted(without or rows, key=_shape_size)
    return (by_size[0] if without else by_size[-1]) if by_size else None


def _arm(row: Row) -> Mapping[str, Any]:
    assert row.result is not None, "rows without a result were left out"
    arm: Mapping[str, Any] = row.result.data["arms"].get(frames.NAIVE, {})
    return arm


def _shape_size(row: Row) -> tuple[int, int]:
    return int(row.point.parameters["sequence"]), int(row.point.parameters["head_dim"])


def account(collected: Collected) -> Table | None:
    """One shape tensor by tensor, with the sums beside what the allocator counted."""
    row = accounted(collected)
    if row is None or row.result is None:
        return None
    tensors, held = row.result.data["account"]["peak"], row.result.data["account"]
    early = {tensor["tensor"] for tensor in held["before_backward"]}
    arm = _arm(row)
    body = [
        [
            tensor["tensor"],
            " × ".join(f"{length:,}" for length in tensor["shape"]),
            binary_bytes(tensor["bytes"]) if tensor["tensor"] in early else NOTHING,
            binary_bytes(tensor["bytes"]),
        ]
        for tensor in tensors
    ]
    sums = [sum(t["bytes"] for t in held[when]) for when in ("before_backward", "peak")]
    counted = [arm.get("memory_before_backward_bytes"), arm.get("peak_memory_bytes")]
    body.append(["sum", NOTHING, *(binary_bytes(total) for total in sums)])
    body.append(
        ["measured", NOTHING, *(_against(c, t) for c, t in zip(counted, sums, strict=True))]
    )
    return Table(
        title=f"Memory of naive attention tensor by tensor: head dim "
        f"{row.point.parameters['head_dim']}, sequence {row.point.parameters['sequence']:,}",
        columns=[
            Column("Tensor", "left"),
            Column("Shape"),
            Column("Before backward"),
            Column("Peak, in backward"),
        ],
        rows=body,
        caption=f"{_setup([row])} By the formula; measured: what the allocator counted.",
        sources=sources_of([row]),
    )


def _against(counted: int | None, total: int) -> str:
    if counted is None:
        return "not counted"
    return f"{binary_bytes(counted)} ({percent(counted / total)} of the sum)"
