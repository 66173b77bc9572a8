"""FSDP: memory per rank by stage, step time, and whether weights arrive in time."""

from functools import partial
from typing import Any

import numpy as np
import pandas as pd

from lmlab.chapters import rank_page
from lmlab.report.compare import Compare
from lmlab.report.figure import Axis, Figure
from lmlab.report.frame import Results, Rows, combine, highest, records, select
from lmlab.report.page import Chapter
from lmlab.report.table import quantity, time

TITLE = "FSDP"

DDP, SHARDED, OURS, TORCH = "ddp", "ddp_sharded_optimizer", "fsdp", "torch_fully_shard"
NAMES = {
    DDP: "data parallel",
    SHARDED: "data parallel, sharded optimizer",
    OURS: "FSDP",
    TORCH: "PyTorch fully_shard",
}
SHORT = {DDP: "DDP", SHARDED: "sharded\nopt.", OURS: "FSDP", TORCH: "fully_\nshard"}
STATE = ("parameters", "gradients", "optimizer_state")
NO_WAIT_MS = 1.0
"""Upper bound on the wait when weights are already gathered."""


def derive(rows: Rows, results: Results) -> Rows:
    """Names, memory by rank, overlap, and speed relative to data parallelism."""
    rows = rank_page.with_variants(rows, results, NAMES, SHORT)
    names = ("communication", "overlapped")
    parts = {name: {"quantity": "profiled_time", "activity": name} for name in names}
    share = partial(exposed_share, results)
    rows = combine(rows, "exposed_share", parts, share, on=["source", "variant"])
    compared = rank_page.compare_with(rows, DDP).rows().assign(quantity="versus_ddp")
    return pd.concat([rows, compared], ignore_index=True) if len(compared) else rows


def exposed_share(results: Results, times: Rows) -> Any:
    """The share of a profiled step in which messages are in flight and nothing is computed."""
    activities = [results.results[s].data["intervals_ms"][variant] for s, variant in times.index]
    edges = [np.concatenate([spans for spans in each.values() if spans]) for each in activities]
    return (times["communication"] - times["overlapped"]) / [np.ptp(each) for each in edges]


def waits(results: Results) -> Rows:
    """How long each block waits for its weights, on the rank where it waits longest. The block that
    ends forward and begins backward keeps them, so its backward wait is dropped."""
    gathers = rank_page.lead_payload(results, "waits_ms")
    found = pd.DataFrame(gathers, columns=["phase", "layer", "ms"])
    again = found["layer"].eq(found["layer"].shift()) & found["phase"].eq("backward")
    found = found[~again]
    return found.assign(value=found["ms"].map(max), position=found.groupby("phase").cumcount() + 1)


TABLES = {
    **rank_page.MEMORY_TABLES,
    "front": rank_page.variant_table(
        "Memory per rank after a step and at its peak, in GiB; step time, and speed relative "
        "to data parallelism (buckets)",
        {
            **{name.replace("_", " "): quantity("memory", "GiB", category=name) for name in STATE},
            "peak": quantity("max_peak_memory", "GiB", phase="forward_backward"),
            "step (ms)": time(phase="total"),
            "speed": quantity("versus_ddp", "text", field="speedup"),
        },
        data=rank_page.after_step,
    ),
    "steps": rank_page.variant_table(
        "A training step, {ranks}; from one profiled, not timed, step of rank 0: messages, "
        "in flight, overlapped (the share of that during which the device computes), and "
        "exposed (the share of that step with messages in flight and nothing computed)",
        {
            "step (ms)": time(phase="total"),
            "device (ms)": time(phase="total", clock="device"),
            "fastest round (ms)": time(phase="total", field="min"),
            "slowest round (ms)": time(phase="total", field="max"),
            "sd (ms)": time(phase="total", field="sd"),
            "speed": quantity("versus_ddp", "text", field="speedup"),
            "messages": quantity("messages_seen", "integer"),
            "in flight (ms)": quantity("profiled_time", "ms", activity="communication"),
            "overlapped": quantity("overlapped_share", "percent", rank=0),
            "exposed": quantity("exposed_share", "percent"),
        },
    ),
}
FIGURES = {
    "memory": rank_page.MEMORY_FIGURE,
    "waits": Figure(
        title="FSDP: wait for each gather of weights, on the rank where it takes longest",
        facet="phase",
        x=Axis(field="position", title="gather, in order of use"),
        y=Axis("ms"),
        data=waits,
    ),
    "overlap": rank_page.overlap_timeline(lambda rows: {name: NAMES[name] for name in (DDP, OURS)}),
}
COMPARISONS = {
    "torch": Compare(variant={"variant": OURS}, baseline={"variant": TORCH}, on=["ranks"])
}


def facts(chapter: Chapter) -> dict[str, Any]:
    shared, rows = rank_page.group_facts(chapter, NAMES), rank_page.lead_rows(chapter.own.rows)
    if shared["allocated"][DDP] is None:
        return {**shared, "ranks": None}
    sharded = rank_page.first_value(rows, quantity="sharded_bytes")
    sharded /= rank_page.first_value(rows, quantity="parameter_bytes")
    share = dict.fromkeys(STATE, 1 - (1 - 1 / shared["world_size"]) * sharded)
    waited = waits(chapter.own)
    total = select(rows, quantity="gather_wait").groupby("rank")["value"].sum()
    return {
        **shared,
        "sizes": shared["sizes"]["memory and time"],
        "expected_error": rank_page.expected_error(rows, OURS, share),
        "no_wait_ms": NO_WAIT_MS,
        "gathers": len(waited),
        "in_time": records(waited[waited["value"] <= NO_WAIT_MS]),
        "longest_wait": highest(waited),
        "waited": max(total, default=None),
        "step": rank_page.first_value(rows, variant=OURS, **rank_page.STEP),
    }
