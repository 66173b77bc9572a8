"""Figures: shares of kernel families and of attention's parts, one layer, one training step."""

from typing import Any

import pandas as pd

from lmlab.report.figure import Axis, Figure
from lmlab.report.frame import Results, Rows, at_first, select
from lmlab.report.text import plain

RUN_NAME = "{size}, context {context}, {precision}"
MODES = ("forward", "forward_backward", "train_step")
OTHER_FAMILIES = ("softmax", "elementwise", "reduction", "copy")
CORES = {"matmul_simt": "matmul (SIMT cores)", "matmul_tensor_core": "matmul (tensor cores)"}
FAMILIES = CORES | {name: name for name in ("matmul", *OTHER_FAMILIES, "optimizer")}
PARTS = {
    "scores": "scores QKᵀ",
    "scale_and_mask": "scale and mask",
    "softmax": "softmax",
    "output": "output PV",
}


def outer_families(results: Results) -> Rows:
    """Family shares of the first and last size in every precision, at one context: the longest of
    those with the most training steps (or runs, if there are no training steps)."""
    rows = select(results.rows, quantity="family_share", family=list(FAMILIES))
    if rows.empty:
        return rows
    steps = select(rows, mode="train_step")
    steps = rows if steps.empty else steps
    sizes = list(dict.fromkeys(steps["size"]))
    rows, steps = (select(each, size=sizes[:1] + sizes[-1:]) for each in (rows, steps))
    runs = steps.groupby("context")["source"].nunique()
    context = max(runs.index, key=lambda context: (runs[context], context))
    order = list(FAMILIES).index
    rows = select(rows, context=context)
    rows = rows.sort_values("family", key=lambda names: names.map(order), kind="stable")
    modes = rows["mode"].map(plain) + f", context {context}"
    return rows.assign(at=rows["size"] + "\n" + rows["precision"], mode=modes)


def part_shares(results: Results) -> Rows:
    """Shares of attention's parts in the first precision; sizes with several contexts, if any."""
    rows = at_first(select(results.rows, quantity="part_share"), "precision")
    contexts = rows.groupby("size")["context"].nunique()
    rows = rows[rows["size"].map(contexts) >= min(2, contexts.max())]
    return rows.assign(panel=rows["size"] + ", " + rows["precision"])


def layer_timeline(results: Results) -> Rows:
    """Every kernel of one layer in the first precision, at the longest context of any size."""
    found = [result for result in results.of("profile") if result.data.get("layer")]
    if not found:
        return pd.DataFrame()
    first = [r for r in found if r.parameters["precision"] == found[0].parameters["precision"]]
    result = max(first, key=lambda result: result.parameters["context"])
    layer = pd.DataFrame(result.data["layer"])
    families = layer["name"].map(lambda name: result.data["names"][name]["family"])
    between = (layer["part"] == "softmax") & (families != "softmax")
    return layer.assign(
        run=RUN_NAME.format(**result.parameters),
        end_ns=layer["start_ns"] + layer["duration_ns"],
        family=families,
        lane=layer["part"].mask(between, "scale_and_mask").map(PARTS).fillna("rest of the layer"),
    )


def step_timelines(results: Results) -> Rows:
    """Host and device phases of two training steps: the first, and the last of the last size."""
    phases = pd.DataFrame(
        {"run": RUN_NAME.format(**result.parameters), "lane": lane, **result.parameters, **phase}
        for result in results.of("profile")
        for lane in ("host", "device")
        for phase in (result.data.get("timeline") or {}).get(f"{lane}_phases", ())
    )
    steps = select(phases, lane="device", phase="optimizer")
    if steps.empty:
        return steps
    of_last_size = select(steps, size=list(steps["size"].unique())[-1])
    outer = select(phases, run=[steps["run"].iloc[0], of_last_size["run"].iloc[-1]])
    outer = select(outer, phase=lambda name: name != "zero_grad")
    return outer.assign(end_ns=outer["start_ns"] + outer["duration_ns"])


TIMELINE: Any = {
    "mark": "timeline",
    "facet": "run",
    "x2": "end_ns",
    "y": Axis(field="lane", title="", categorical=True),
}
FIGURES = {
    "families": Figure(
        title="Share of device time by kernel family, by size and precision",
        mark="stack",
        facet="mode",
        color="family",
        names=FAMILIES,
        x=Axis(field="at", title="", categorical=True),
        y=Axis("share of device time (%)", scale=100),
        data=outer_families,
    ),
    "attention": Figure(
        title="Attention in a forward pass: share of its device time by context length",
        mark="stack",
        facet="panel",
        color="part",
        names=PARTS,
        x=Axis(field="context", title="context", categorical=True),
        y=Axis("share of attention (%)", scale=100),
        data=part_shares,
    ),
    "layer": Figure(
        title="One layer of a forward pass: when its kernels run",
        x=Axis(field="start_ns", title="µs since the layer's first kernel", scale=1e-3),
        data=layer_timeline,
        color="family",
        names=FAMILIES,
        **TIMELINE,
    ),
    "steps": Figure(
        title="One profiled training step: phases on the host and on the device",
        x=Axis(field="start_ns", title="ms since the step began", scale=1e-6),
        data=step_timelines,
        color="phase",
        height=2.6,
        **TIMELINE,
    ),
}
