"""FSDP: memory per rank by stage, step time, and whether weights arrive in time."""

from __future__ import annotations

from typing import Any

import pandas as pd

from lmlab.chapters import rank_memory_page as rank_memory
from lmlab.chapters.rank_memory_page import bytes_of, expected_error, highest, peak_of
from lmlab.chapters.rank_page import (
    against,
    describe,
    lead,
    measured,
    not_started,
    of_lead,
    overlap_timeline,
    sizes,
    timeline,
    with_ranks,
)
from lmlab.report.compare import Compare
from lmlab.report.figure import Axis, Figure, value_axis
from lmlab.report.frame import Results, Rows, combine, select
from lmlab.report.page import Chapter
from lmlab.report.table import Table, quantity, time

TITLE = "FSDP"

DDP, SHARDED, OURS, TORCH = "ddp", "ddp_sharded_optimizer", "fsdp", "torch_fully_shard"
NAMES = {
    DDP: "data parallel",
    SHARDED: "data parallel, sharded optimizer",
    OURS: "FSDP",
    TORCH: "PyTorch fully_shard",
}
SHORT = {DDP: "DDP", SHARDED: "sharded\nopt.", OURS: "FSDP", TORCH: "fully_\nshard"}
NO_WAIT_MS = 0.2
"""Upper bound on the wait when weights are already gathered."""


def derive(rows: Rows, results: Results) -> Rows:
    """Names, memory by rank, overlap, and speed relative to data parallelism."""
    rows = with_ranks(rows, results, [*rank_memory.LABELS, "activity"])
    rows = highest(rows.assign(scheme=rows.variant.map(NAMES), short=rows.variant.map(SHORT)))
    compared = against(rows, DDP).rows().assign(quantity="versus_ddp")
    rows = pd.concat([rows, compared], ignore_index=True) if len(compared) else rows
    profiled = {
        name: {"quantity": "profiled_time", "activity": name}
        for name in ("overlapped", "communication")
    }
    on = ("source", "variant")
    return combine(rows, "overlapped", profiled, lambda p: p.overlapped / p.communication, on=on)


def waits(results: Results) -> Rows:
    """How long each block waits for its weights, on the rank where it waits longest.

    Of the group shown on the front page. The block that ends forward and begins backward is not
    gathered again.
    """
    ours = lead(results.rows)
    found: list[dict[str, Any]] = []
    for result in results.of("fsdp"):
        if "waits_ms" not in result.data or describe(result.data["ranks"]) != ours:
            continue
        rows = result.data["waits_ms"]
        forward = [row["layer"] for row in rows if row["phase"] == "forward"]
        for phase in ("forward", "backward"):
            mine = [row for row in rows if row["phase"] == phase]
            if phase == "backward" and mine and mine[0]["layer"] == forward[-1]:
                mine = mine[1:]
            found += [
                {"phase": phase, "position": index, "layer": row["layer"], "value": max(row["ms"])}
                for index, row in enumerate(mine, 1)
            ]
    return pd.DataFrame(found, columns=["phase", "position", "layer", "value"])


def _overlap(results: Results) -> Rows:
    return timeline(results, [DDP, OURS], NAMES)


TABLES = {
    **rank_memory.TABLES,
    "front": Table(
        title="Memory per rank after a step and at its peak, in GiB; step time, and speed relative "
        "to data parallelism",
        rows=["scheme"],
        headers={"scheme": "variant"},
        data=rank_memory.after_step,
        columns={
            "parameters": quantity("memory", "GiB", category="parameters"),
            "gradients": quantity("memory", "GiB", category="gradients"),
            "optimizer state": quantity("memory", "GiB", category="optimizer_state"),
            "peak": quantity("most_peak_memory", "GiB", phase="forward_backward"),
            "step (ms)": time(phase="total"),
            "speed": quantity("versus_ddp", "text", field="speedup"),
        },
    ),
    "steps": Table(
        title="A training step, {ranks}; messages, in flight and overlapped: one profiled step of "
        "rank 0",
        facet="ranks",
        rows=["scheme"],
        headers={"scheme": "variant"},
        data=measured,
        columns={
            "step (ms)": time(phase="total"),
            "fastest round": time(phase="total", field="min"),
            "slowest round": time(phase="total", field="max"),
            "sd": time(phase="total", field="sd"),
            "speed": quantity("versus_ddp", "text", field="speedup"),
            "messages": quantity("messages_seen", "integer"),
            "in flight (ms)": quantity("profiled_time", "ms", activity="communication"),
            "overlapped": quantity("overlapped", "percent"),
        },
    ),
}


FIGURES = {
    "memory": rank_memory.FIGURE,
    "waits": Figure(
        title="FSDP: wait of each block for its weights, on the rank where it waits longest",
        mark="line",
        facet="phase",
        x=Axis(field="position", title="block, in order of use"),
        y=value_axis("ms"),
        data=waits,
    ),
    "overlap": overlap_timeline(_overlap),
}

COMPARISONS = {
    "torch": Compare(variant={"variant": OURS}, baseline={"variant": TORCH}, on=["ranks"]),
}


def facts(chapter: Chapter) -> dict[str, Any]:
    """Values that the templates use, for the group shown on the front page."""
    everything = chapter.own.rows
    rows = of_lead(everything)
    if bytes_of(rows, DDP) is None:
        return {"ranks": None, "not_started": not_started(everything)}
    first = rows.iloc[0]
    sharded, whole = (
        select(rows, quantity=name)["value"] for name in ("sharded_bytes", "parameter_bytes")
    )
    kept = 1 - (1 - 1 / first["world_size"]) * sharded.iloc[0] / whole.iloc[0]
    share = dict.fromkeys(("parameters", "gradients", "optimizer_state"), kept)
    waited = waits(chapter.own)
    total = select(rows, quantity="gather_wait").groupby("rank")["value"].sum()
    step = select(rows, quantity="time", variant=OURS, phase="total", status="ok")["value"]
    return {
        "ranks": lead(rows),
        "world_size": first["world_size"],
        "own_gpu": first["placement"] == "own_gpu",
        "not_started": not_started(everything),
        "sizes": sizes(everything)["memory and time"],
        "step_limit_s": first["step_limit_s"],
        "allocated": {name: bytes_of(rows, name) for name in NAMES},
        "peak": {name: peak_of(rows, name) for name in NAMES},
        "expected_error": {
            DDP: expected_error(rows, DDP, {}),
            OURS: expected_error(rows, OURS, share),
        },
        "sharded_share": sharded.iloc[0] / whole.iloc[0],
        "gathers": len(waited),
        "in_time": int((waited["value"] <= NO_WAIT_MS).sum()),
        "longest_wait": None if waited.empty else waited.sort_values("value").iloc[-1].to_dict(),
        "waited": None if total.empty else max(total),
        "step": None if step.empty else step.iloc[0],
        "versus_ddp": {p.variant["variant"]: p for p in against(rows, DDP).pairs},
    }
