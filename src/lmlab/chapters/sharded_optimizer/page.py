"""Sharded optimizer: memory per rank by stage and time of the optimizer, compared with ZeRO-1."""

from typing import Any

from lmlab.chapters import rank_page
from lmlab.report.compare import Compare
from lmlab.report.frame import Results, Rows, select
from lmlab.report.page import Chapter
from lmlab.report.table import memory, time

TITLE = "Sharded optimizer"

PLAIN, OURS, TORCH = "replicated", "sharded", "torch_zero"
NAMES = {
    PLAIN: "AdamW on every rank",
    OURS: "sharded optimizer",
    TORCH: "PyTorch ZeroRedundancyOptimizer",
}
SHORT = {PLAIN: "AdamW", OURS: "sharded", TORCH: "PyTorch\nZeRO"}


def derive(rows: Rows, results: Results) -> Rows:
    return rank_page.with_variants(rows, results, NAMES, SHORT)


TABLES = {
    **rank_page.MEMORY_TABLES,
    "front": rank_page.variant_table(
        "Memory per rank after a step and at its peak, in GiB; time of the optimizer and of "
        "the step",
        {
            "optimizer state": memory("memory", category="optimizer_state"),
            "allocated": memory("max_allocated"),
            "peak, forward and backward": memory("max_peak_memory", phase="forward_backward"),
            "peak, optimizer step": memory("max_peak_memory", phase="optimizer"),
            "optimizer (ms)": time(phase="optimizer"),
            "step (ms)": time(phase="total"),
        },
        data=rank_page.after_step,
    ),
    "times": rank_page.variant_table(
        "Time of the optimizer and of the whole step, slowest rank, {ranks}",
        {
            "optimizer (ms)": time(phase="optimizer"),
            "optimizer, sd (ms)": time(phase="optimizer", field="sd"),
            "step (ms)": time(phase="total"),
            "step, device (ms)": time(phase="total", clock="device"),
            "step, sd (ms)": time(phase="total", field="sd"),
        },
    ),
}
FIGURES = {"memory": rank_page.MEMORY_FIGURE}
COMPARISONS = {
    name: Compare(variant={"variant": OURS}, baseline={"variant": other}, on=["ranks", "phase"])
    for name, other in (("plain", PLAIN), ("torch", TORCH))
}


def facts(chapter: Chapter) -> dict[str, Any]:
    shared, rows = rank_page.group_facts(chapter, NAMES), rank_page.lead_rows(chapter.own.rows)
    if shared["allocated"][OURS] is None:
        return {**shared, "ranks": None}
    owned = select(rows, quantity="owned_bytes")["value"]
    parameters, share = sum(owned), (shared["world_size"] - 1) / shared["world_size"]
    stored = {"optimizer_state": max(owned) / parameters}
    return {
        **shared,
        "state": {name: rank_page.category_of(rows, name, "optimizer_state") for name in NAMES},
        "expected_error": rank_page.expected_error(rows, OURS, stored),
        "fullest_share": stored["optimizer_state"],
        # With rings. Ours all-reduces gradients, then broadcasts parameters from their owners;
        # ZeRO-1 reduce-scatters and all-gathers, as many bytes as plain data parallelism.
        "sent": {"plain": 2 * share * parameters, "ours": 3 * share * parameters},
    }
