"""Sharded optimizer: memory per rank by stage and time of the optimizer, compared with ZeRO-1."""

from __future__ import annotations

from typing import Any

from lmlab.chapters import rank_memory_page as rank_memory
from lmlab.chapters.rank_memory_page import bytes_of, expected_error, highest, peak_of
from lmlab.chapters.rank_page import lead, measured, not_started, of_lead, sizes, with_ranks
from lmlab.report.compare import Compare
from lmlab.report.frame import Results, Rows, select
from lmlab.report.page import Chapter
from lmlab.report.table import Table, quantity, time

TITLE = "Sharded optimizer"

PLAIN, OURS, TORCH = "replicated", "sharded", "torch_zero"
NAMES = {
    PLAIN: "AdamW on every rank",
    OURS: "sharded optimizer",
    TORCH: "PyTorch ZeroRedundancyOptimizer",
}
PASSES = "forward_backward"
SHORT = {PLAIN: "AdamW", OURS: "sharded", TORCH: "PyTorch\nZeRO"}


def derive(rows: Rows, results: Results) -> Rows:
    """Names, and the rank that has allocated most."""
    rows = with_ranks(rows, results, rank_memory.LABELS)
    return highest(rows.assign(scheme=rows.variant.map(NAMES), short=rows.variant.map(SHORT)))


TABLES = {
    **rank_memory.TABLES,
    "front": Table(
        title="Memory per rank after a step and at its peak, in GiB; time of the optimizer and of "
        "the step",
        rows=["scheme"],
        headers={"scheme": "variant"},
        data=rank_memory.after_step,
        columns={
            "optimizer state": quantity("memory", "GiB", category="optimizer_state"),
            "allocated": quantity("most_allocated", "GiB"),
            "peak, forward and backward": quantity("most_peak_memory", "GiB", phase=PASSES),
            "peak, optimizer step": quantity("most_peak_memory", "GiB", phase="optimizer"),
            "optimizer (ms)": time(phase="optimizer"),
            "step (ms)": time(phase="total"),
        },
    ),
    "times": Table(
        title="Time of the optimizer and of the whole step, slowest rank, {ranks}",
        facet="ranks",
        rows=["scheme"],
        headers={"scheme": "variant"},
        data=measured,
        columns={
            "optimizer (ms)": time(phase="optimizer"),
            "optimizer, sd": time(phase="optimizer", field="sd"),
            "step (ms)": time(phase="total"),
            "step, sd": time(phase="total", field="sd"),
        },
    ),
}
FIGURES = {"memory": rank_memory.FIGURE}
COMPARISONS = {
    name: Compare(variant={"variant": OURS}, baseline={"variant": other}, on=["ranks", "phase"])
    for name, other in (("plain", PLAIN), ("torch", TORCH))
}


def facts(chapter: Chapter) -> dict[str, Any]:
    """Values that the templates use, for the group shown on the front page."""
    everything = chapter.own.rows
    rows = of_lead(everything)
    if bytes_of(rows, OURS) is None:
        return {"ranks": None, "not_started": not_started(everything)}
    first = rows.iloc[0]
    ranks = first["world_size"]
    owned = select(rows, quantity="owned_bytes")["value"]
    parameters, share = sum(owned), (ranks - 1) / ranks
    times = select(rows, quantity="time", phase="total", status="ok")
    return {
        "ranks": lead(rows),
        "world_size": ranks,
        "own_gpu": first["placement"] == "own_gpu",
        "context": first["context"],
        "not_started": not_started(everything),
        "sizes": sizes(everything),
        "step_limit_s": first["step_limit_s"],
        "rounds": None if times.empty else times.iloc[0]["n"],
        "asked": first["rounds"],
        "state": {name: bytes_of(rows, name, category="optimizer_state") for name in NAMES},
        "allocated": {name: bytes_of(rows, name) for name in NAMES},
        "peak": {name: peak_of(rows, name) for name in NAMES},
        "expected_error": expected_error(rows, OURS, {"optimizer_state": max(owned) / parameters}),
        "fullest_share": max(owned) / parameters,
        # Rings: gradients are averaged everywhere, then parameters come from their owners; ZeRO-1
        # scatters gradients and gathers parameters.
        "sent": {"plain": 2 * share * parameters, "ours": 3 * share * parameters},
    }
