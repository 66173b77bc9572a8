"""Figures: active memory over a step, what its peak consists of, and peaks by context length."""

from typing import Any

import numpy as np
import pandas as pd

from lmlab.report.figure import Axis, Figure
from lmlab.report.frame import Results, Rows, records, select
from lmlab.report.text import GIB

TIMELINE = {"topic": "timeline"}
STEP = {**TIMELINE, "mode": "train_step"}
PHASES = ("forward", "backward", "optimizer")
PARTS = {
    "parameters": "parameters",
    "optimizer_state": "optimizer state",
    "gradients": "gradients",
    "weight_copies": "16-bit copies of weights",
    "fp32_weights": "attention weights, fp32",
    "half_weights": "attention weights, 16-bit",
    "activations": "other activations",
    "workspace": "workspace and inputs",
    "peak": "peak",
}
CURVES = {**PARTS, "activations": "activations", "other": PARTS["workspace"]}
COMPARED_SIZES = 3


def largest_runs(results: Results, **where: Any) -> Rows:
    """Recorded runs of the largest size, in one precision."""
    runs = one_precision(select(results.rows, quantity="peak_memory", status="ok", **where))
    return select(runs, size=list(runs["size"])[-1:])


def timeline(results: Results) -> Rows:
    """A training step of the largest size, at its shortest and longest context."""
    steps = largest_runs(results, **STEP)
    return _curves(results, select(steps, context=_ends(steps)), "{point}")


def modes(results: Results) -> Rows:
    """A forward pass with its graph and a training step, of the largest size, middle context."""
    runs = select(largest_runs(results, **TIMELINE), mode=["forward_graph", "train_step"])
    contexts = runs["context"].unique()
    middle = select(runs, context=list(contexts[len(contexts) // 2 :][:1]))
    return _curves(results, middle, "{point}: {run}")


def _curves(results: Results, runs: Rows, title: str) -> Rows:
    """Active bytes by category, events spread evenly over each phase so that phases line up."""
    found = [pd.DataFrame()]
    for row in records(runs):
        data = results.results[row["source"]].data[row["mode"]]
        edges = [0, *(phase["last_event"] for phase in data["phases"])]
        positions = np.interp(data["event"], edges, range(len(edges)))
        curves = pd.DataFrame(data["bytes"]).T.groupby(CURVES.get, sort=False).sum().T
        curves = curves.assign(position=positions, point=title.format(**row))
        found.append(curves.melt(["position", "point"], var_name="category"))
    return pd.concat(found)


def composition(results: Results) -> Rows:
    """Parts of the largest sizes' peaks, at the shortest and longest context where all fit."""
    parts = select(results.rows, quantity="part", part=lambda name: name != "peak", **STEP)
    parts = select(parts, size=list(parts["size"].unique()[-COMPARED_SIZES:]))
    runs = parts.groupby("context")["source"].nunique()
    parts = select(parts, context=_ends(parts[parts["context"].map(runs) == runs.max()]))
    return parts.assign(bar=parts["size"] + "\n" + parts["precision"])


def one_precision(rows: Rows) -> Rows:
    """Rows in fp32 where that was measured, else in another precision."""
    first = min(rows["precision"].unique(), key=lambda name: name != "fp32", default=None)
    return select(rows, precision=first)


def _ends(rows: Rows) -> list[Any]:
    return [rows["context"].min(), rows["context"].max()]


AREA: Any = {
    "mark": "area",
    "facet": "point",
    "color": "category",
    "names": {name: name for name in CURVES.values() if name != "peak"},
    "x": Axis(
        field="position",
        title="phase (equal widths, not to time scale)",
        ticks={phase: number for number, phase in enumerate(PHASES)},
    ),
    "y": Axis("GiB", scale=1 / GIB),
    "share_x": True,
}
FIGURES = {
    "timeline": Figure(title="Memory during one training step", data=timeline, **AREA),
    "modes": Figure(title="Memory of a forward pass and of a training step", data=modes, **AREA),
    "composition": Figure(
        title="Composition of the peak of a training step",
        mark="stack",
        facet="context",
        facet_title="context {}",
        color="part",
        x=Axis(field="bar", title="size and precision", categorical=True),
        y=Axis("GiB", scale=1 / GIB),
        data=composition,
        height=4.0,
    ),
    "peak_by_context": Figure(
        title="Peak memory by context length",
        facet="run",
        color="size",
        dash="precision",
        x=Axis(field="context", title="context length", log=2),
        y=Axis("GiB", scale=1 / GIB, log=10),
        where={**TIMELINE, "quantity": "peak_memory"},
    ),
}
