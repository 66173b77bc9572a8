"""Memory of ranks by stage of a training step: tables and a figure that two chapters share.

Categories are those of the rank that has allocated most at a stage; peaks are the highest of all
ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd

from lmlab.chapters.rank_page import measured, of_lead
from lmlab.report.figure import Axis, Figure, value_axis
from lmlab.report.frame import Results, Rows, select
from lmlab.report.table import Table, quantity
from lmlab.report.text import GIB

STAGES = {
    "initialized": "after initialization",
    "after_forward": "after forward",
    "before_step": "before the optimizer step",
    "after_step": "after the optimizer step",
}
CATEGORIES = ("parameters", "gradients", "optimizer_state", "activations", "other")
# The stage at which each category is complete.
COMPLETE = {
    "parameters": "initialized",
    "gradients": "before_step",
    "optimizer_state": "after_step",
    "activations": "after_forward",
}
PHASES = {"forward_backward": "forward and backward", "optimizer": "the optimizer step"}
LABELS = ["variant", "phase", "stage", "category", "rank", "scope", "purpose", "candidate"]


def highest(rows: Rows) -> Rows:
    """The rows plus the most that any rank allocated at a stage, and its peak in a phase."""
    rows = rows.assign(when=rows["stage"].map(STAGES))
    parts = [rows]
    for name, key in (("allocated", "stage"), ("peak_memory", "phase")):
        found = select(rows, quantity=name, status="ok")
        most = pd.to_numeric(found["value"]).groupby([found.source, found.variant, found[key]])
        parts.append(found.loc[most.idxmax()].assign(quantity=f"most_{name}"))
    return pd.concat(parts, ignore_index=True)


def bytes_of(
    rows: Rows, variant: str, stage: str = "after_step", category: str | None = None
) -> Any:
    """Memory of the rank with the most allocated memory, in all or in one category.

    Of the group shown on the front page.
    """
    found = select(of_lead(rows), variant=variant, stage=stage, status="ok")
    if category is None:
        values = select(found, quantity="most_allocated")["value"]
    else:
        values = select(found, quantity="memory", category=category)["value"]
    return None if values.empty else values.iloc[0]


def peak_of(rows: Rows, variant: str) -> dict[str, Any] | None:
    """The highest peak of a step and its phase; None on a CPU."""
    found = select(of_lead(rows), quantity="most_peak_memory", variant=variant)
    if found.empty:
        return None
    top = found.sort_values("value", key=pd.to_numeric).iloc[-1]
    return {"bytes": top["value"], "phase": PHASES[top["phase"]]}


def expected_error(rows: Rows, variant: str, share: Mapping[str, float]) -> float | None:
    """The largest relative difference between a category and what the cost model expects; `share`
    is the part that each rank stores."""
    expected = select(of_lead(rows), quantity="expected_memory")
    errors = [
        abs(found / (want * share.get(category, 1.0)) - 1)
        for category, want in zip(expected["category"], expected["value"], strict=True)
        if (found := bytes_of(rows, variant, COMPLETE[category], category)) is not None
    ]
    return max(errors, default=None)


def after_step(rows: Rows) -> Rows:
    """Rows of the group shown on the front page, without earlier stages."""
    return select(of_lead(rows), stage=lambda stage: stage == "after_step" or stage != stage)


def _categories(format: str) -> dict[str, Any]:
    return {
        name.replace("_", " "): quantity("memory", format, category=name) for name in CATEGORIES
    }


TABLES = {
    "stages": Table(
        title="Memory of the rank with the most allocated memory, in its first step, MiB, {ranks}. "
        "Reserved: kept by the allocator; device: as the device reports it",
        facet="ranks",
        rows=["scheme", "when"],
        headers={"when": "stage", "scheme": "variant"},
        data=measured,
        columns={
            **_categories("MiB"),
            "allocated": quantity("most_allocated", "MiB"),
            "reserved": quantity("reserved", "MiB"),
            "device": quantity("device_memory", "MiB"),
        },
    ),
    "peaks": Table(
        title="Peak memory of a first step, MiB, {ranks}",
        facet="ranks",
        rows=["scheme"],
        headers={"scheme": "variant"},
        data=measured,
        columns={
            "forward and backward": quantity("most_peak_memory", "MiB", phase="forward_backward"),
            "optimizer step": quantity("most_peak_memory", "MiB", phase="optimizer"),
        },
    ),
}


def _figure_rows(results: Results) -> Rows:
    return select(of_lead(results.rows), quantity="memory", status="ok")


FIGURE = Figure(
    title="Memory of the rank with the most allocated memory, by stage of its first step",
    mark="stack",
    facet="when",
    color="category",
    names={"optimizer_state": "optimizer state"},
    x=Axis(field="short", title="", categorical=True),
    y=value_axis("GiB allocated", scale=1 / GIB),
    data=_figure_rows,
    height=3.8,
)
