"""From nvidia-smi to a tensor's bytes: every layer a row with its reason; and what lies unused."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from lmlab.writeup.caption import describe, with_reasons
from lmlab.writeup.collect import Collected, Row, sources_of
from lmlab.writeup.frames import memory as frames
from lmlab.writeup.numbers import binary_bytes, percent, significant
from lmlab.writeup.table import NOTHING, STATUS_CELLS, Column, Table

NOT_TOLD = "not told"
CONTEXT = "CUDA context, kernel images, library handles"


def layers(
    collected: Collected, data: pd.DataFrame, shown: Sequence[Mapping[str, Any]]
) -> dict[str, Table]:
    """The layers at one place, and reserved against allocated everywhere; a CPU has neither."""
    rows = [(place, frames.recorded(collected, place, "train_step")) for place in shown]
    modes = {place["precision"]: mode for place, mode in rows if mode is not None}
    if not modes:
        return {}
    used = [
        row
        for row in frames.rows_of(collected, frames.TIMELINE)
        if any(all(row.point.parameters[k] == v for k, v in p.items()) for p in shown)
    ]
    title = f"{shown[0]['size']} at context {shown[0]['context']}, after the training step"
    accounts = {name: mode["accounting"] for name, mode in modes.items()}
    if collected.device != "cuda":
        return {"layers": _of_a_process(accounts, modes, title, used)}
    return {
        "layers": _of_a_gpu(accounts, title, used),
        "unused": unused(collected, data),
    }


def _of_a_gpu(accounts: Mapping[str, Mapping[str, Any]], title: str, used: Sequence[Row]) -> Table:
    nccl = any(account["nccl_is_running"] for account in accounts.values())
    libraries = f"{CONTEXT}{', NCCL' if nccl else '; NCCL is not running'}"
    lines: list[tuple[str, str, Any]] = [
        ("nvidia-smi: used on the GPU", "the driver's count, its own reserve and all processes "
         "included", lambda a: a["nvidia_smi_used_bytes"]),
        ("used, as CUDA tells this process", "mem_get_info: total minus free",
         lambda a: a["device_used_bytes"]),
        ("− outside PyTorch", libraries, lambda a: a["outside_pytorch_bytes"]),
        ("= reserved by PyTorch", "memory_reserved: segments taken from the driver",
         lambda a: a["reserved_bytes"]),
        ("− cached", "free inside the allocator, kept for the next tensor",
         lambda a: _less(a["reserved_bytes"], a["allocated_bytes"])),
        ("   of it in splits", "beside a tensor in its segment: only what fits there can use it",
         lambda a: a["inactive_split_bytes"]),
        ("= allocated", "memory_allocated: blocks that tensors live in",
         lambda a: a["allocated_bytes"]),
        ("− rounding", "blocks are larger than what was asked for",
         lambda a: _less(a["allocated_bytes"], a["requested_bytes"])),
        ("= requested", "bytes of tensors", lambda a: a["requested_bytes"]),
    ]  # fmt: skip
    return Table(
        title=f"From nvidia-smi to tensors: {title}",
        columns=[
            Column("Layer", "left"),
            *(Column(name) for name in accounts),
            Column("What it is", "left"),
        ],
        rows=[
            [name, *(_bytes(read(account)) for account in accounts.values()), reason]
            for name, reason, read in lines
        ],
        caption=f"{describe(_results(used))} Read when the step was done: its activations are free "
        "again and lie in the cache.",
        sources=sources_of(used),
    )


def _of_a_process(
    accounts: Mapping[str, Mapping[str, Any]],
    modes: Mapping[str, Mapping[str, Any]],
    title: str,
    used: Sequence[Row],
) -> Table:
    ends = {name: mode["phases"][-1]["end_bytes"] for name, mode in modes.items()}
    resident = {name: account["resident_bytes"] for name, account in accounts.items()}
    lines = [
        (
            "resident memory of the process",
            resident,
            "what the operating system counts: interpreter, libraries, tensors",
        ),
        (
            "− outside tensors",
            _differences(resident, ends),
            "code, and freed memory not given back",
        ),
        ("= live tensors", ends, "replayed, at the end of the step"),
    ]
    rows = [
        [name, *(_bytes(count) for count in counts.values()), reason]
        for name, counts, reason in lines
    ]
    return Table(
        title=f"From the process to its tensors: {title}",
        columns=[
            Column("Layer", "left"),
            *(Column(name) for name in accounts),
            Column("What it is", "left"),
        ],
        rows=rows,
        caption=describe(_results(used)),
        sources=sources_of(used),
    )


def unused(collected: Collected, data: pd.DataFrame) -> Table:
    """Reserved against allocated at the peak of every train step."""
    steps = frames.of(data, mode="train_step")
    unit, size = frames.unit_of(steps["reserved_bytes"])
    precisions = frames.order(steps, "precision")
    rows = []
    for (name, context), part in steps.groupby(["size", "context"], sort=False):
        cells = []
        for precision in precisions:
            cells += _unused_cells(frames.of(part, precision=precision).iloc[0], size)
        rows.append([str(name), str(context), *cells])
    titles = ("peak reserved", "not allocated", "largest splits")
    used = frames.rows_of(collected, frames.TIMELINE)
    return Table(
        title=f"Reserved and not allocated, training step ({unit})",
        columns=[
            Column("Size", "left"),
            Column("Context"),
            *(Column(f"{title}, {p}") for p in precisions for title in titles),
        ],
        rows=rows,
        caption=f"{with_reasons(describe(_results(used)), _results(used))} Both peaks of one step "
        "that began with an emptied allocator; splits are free pieces in segments that are partly "
        "in use, at their own peak.",
        sources=sources_of(used),
    )


def _unused_cells(row: pd.Series, size: int) -> list[str]:
    if row["status"] != "ok":
        return [STATUS_CELLS[row["status"]]] * 3
    if math.isnan(row["reserved_bytes"]):
        return [NOT_TOLD] * 3
    share = 1 - row["allocated_bytes"] / row["reserved_bytes"]
    splits = row["splits_bytes"]
    return [
        significant(row["reserved_bytes"] / size, 4),
        percent(share, 2),
        NOT_TOLD if math.isnan(splits) else significant(splits / size, 3),
    ]


def _differences(whole: Mapping[str, int], part: Mapping[str, int]) -> dict[str, int]:
    return {name: whole[name] - part[name] for name in whole}


def _less(whole: int | None, part: int | None) -> int | None:
    return None if whole is None or part is None else whole - part


def _bytes(count: int | None) -> str:
    if count is None:
        return NOT_TOLD
    return binary_bytes(count) if count >= 0 else NOTHING


def _results(rows: Sequence[Row]) -> list[Any]:
    return [row.result for row in rows if row.result is not None]
