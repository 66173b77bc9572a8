"""Where the memory peak is, what it consists of, what bf16 changes, what checkpointing buys."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd

from lmlab.report.compare import Compare, Pair
from lmlab.report.figure import Axis, Figure
from lmlab.report.frame import Results, Rows, combine, computed, records, select, table_of
from lmlab.report.page import Chapter
from lmlab.report.table import Table, memory, quantity, time
from lmlab.report.text import FORMATS, GIB, times
from lmlab.report.verdict import SMALLEST_DIFFERENCE

TITLE = "Memory"

TIMELINE, CHECKPOINTING = {"topic": "timeline"}, {"topic": "checkpointing"}
LONG, BLOCK = {"topic": "long_context"}, {"topic": "block"}
STEP = {**TIMELINE, "mode": "train_step"}
ANY_STEP: Any = {"mode": "train_step", "topic": ["timeline", "long_context"]}
MODES = {
    "forward": "forward without graph",
    "forward_graph": "forward with graph",
    "train_step": "training step",
}
PHASES = ("forward", "backward", "optimizer")
PRECISIONS = ("fp32", "bf16")
VARIANTS = ("eager", "compiled")
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
LAYERS = {
    "nvidia_smi_used": "used, by nvidia-smi (with the driver's own reserve)",
    "outside_pytorch": "outside PyTorch: CUDA context, kernels, libraries",
    "reserved": "reserved by PyTorch",
    "allocated": "allocated to tensors",
    "requested": "requested by tensors, without rounding",
    "resident": "resident memory of the process",
}
# Columns that exist even when no point was measured.
SHAPE = ("size", "context", "precision", "attention", "d_model", "num_layers")
COLUMNS = (*SHAPE, "mode", "variant", "part", "phase", "layer", "kind", "operation", "origin")
BEST_PREDICTED = "best predicted"
FRONT_SEGMENTS = 2
COMPARED_SIZES = 3
LARGEST_OPERATIONS = 5
# Beyond this share of the gradients a peak is in the last segment of the backward pass.
LATE_IN_BACKWARD = 0.5


def derive(rows: Rows, results: Results) -> Rows:
    """Sizes in ascending order; parts of the peak, changes by bf16, prediction errors."""
    rows = rows.reindex(columns=list(dict.fromkeys([*rows.columns, *COLUMNS])))
    rows = rows.sort_values(["d_model", "num_layers", "context"], kind="stable", ignore_index=True)
    rows = pd.concat([rows, _parts(rows), _peaks_with_phase(rows)], ignore_index=True)
    peaks = {p: {"quantity": "part", "part": "peak", "precision": p} for p in PRECISIONS}
    on: tuple[str, ...] = ("topic", "size", "context", "mode")
    rows = combine(rows, "bf16_ratio", peaks, lambda p: p.bf16 / p.fp32, on=on)
    counters = {name: {"quantity": f"{name}_peak"} for name in ("replayed", "allocator")}
    on = ("source", "mode")
    rows = combine(rows, "replay_equal", counters, lambda p: p.replayed == p.allocator, on=on)
    names = {"expected": "predicted_peak", "found": "peak_memory"}
    for label, topic in (("mode", TIMELINE), ("mode", LONG), ("variant", CHECKPOINTING)):
        both = {key: {"quantity": name, **topic} for key, name in names.items()}
        on = ("source", label)
        rows = combine(rows, "prediction_error", both, lambda p: p.expected / p.found - 1, on=on)
    layers = {n: {"layer": f"peak_{n}", **STEP} for n in ("allocated", "reserved")}
    rows = combine(rows, "unused_share", layers, lambda p: 1 - p.allocated / p.reserved)
    saved = {v: {"quantity": "saved_for_backward", "variant": v, **BLOCK} for v in VARIANTS}
    rows = combine(rows, "compiled_to_eager", saved, lambda p: p.compiled / p.eager)
    relative = [
        computed(pair.variant, {"relative_time": 1 / pair.ratio}, clock=clock, shown=shown(pair))
        for clock in ("wall", "device")
        for pair in slowdowns(rows, clock).values()
    ]
    more = [*_longest(rows), _published(rows, results), *relative]
    rows = pd.concat([rows, *more], ignore_index=True)
    named = rows["size"] + ", context " + rows["context"].astype(str) + ", " + rows["precision"]
    return rows.assign(run=[MODES.get(mode, mode) for mode in rows["mode"]], point=named)


def _parts(rows: Rows) -> Rows:
    """Live bytes at the peak by part, attention weights apart from the other activations."""
    found: list[dict[str, Any]] = []
    weights = select(rows, quantity="attention_weights", stage="peak")
    live = select(rows, quantity="live", stage="peak")
    for (source, mode), group in live.groupby(["source", "mode"], sort=False):
        mine = select(weights, source=source, mode=mode)
        counts = dict(zip(group["category"], group["value"], strict=True))
        counts["peak"] = sum(counts.values())
        counts["workspace"] += counts["other"]
        counts["fp32_weights"] = int(select(mine, dtype="fp32")["value"].sum())
        counts["half_weights"] = int(mine["value"].sum()) - counts["fp32_weights"]
        counts["activations"] -= counts["fp32_weights"] + counts["half_weights"]
        base = {**records(group)[0], "quantity": "part"}
        for key, name in PARTS.items():
            found.append({**base, "category": key, "part": name, "value": counts[key]})
    return table_of(found)


def _peaks_with_phase(rows: Rows) -> Rows:
    """Peaks of training steps as text: GiB and phase; a step that did not fit keeps its status."""
    phases = select(rows, quantity="peak_phase", **ANY_STEP).set_index("source")["value"]
    peaks = select(rows, quantity="peak_memory", **ANY_STEP)
    phase = peaks["source"].map(phases)
    size = peaks["value"].fillna(0).map(FORMATS["GiB"])
    # A single word is the cell itself; the chapter's own tables give the reason.
    peaks = peaks.assign(reason=peaks["reason"].mask(peaks["status"] == "oom", "OOM"))
    with_phase = peaks.assign(quantity="peak_with_phase", value=size + " " + phase.astype(str))
    return pd.concat([with_phase, peaks.assign(quantity="phase_of_peak", value=phase)])


def _longest(rows: Rows) -> Iterator[Rows]:
    """The longest context whose step fits, and what the shortest that does not would need."""
    steps = select(rows, quantity="peak_memory", **ANY_STEP)
    needs = select(rows, quantity="predicted_peak", **ANY_STEP).set_index("source")["value"]
    for _, group in steps.groupby(["size", "batch", "precision"], sort=False):
        ordered = group.sort_values("context", kind="stable")
        fits, fails = (records(select(ordered, status=name)) for name in ("ok", "oom"))
        numbers: dict[str, Any] = {}
        if fits:
            numbers |= {"longest_context": fits[-1]["context"], "longest_peak": fits[-1]["value"]}
        if fails:
            need = needs.get(fails[0]["source"])
            numbers |= {"next_context": fails[0]["context"], "next_peak": need}
        if known := fails[:1] or fits[-1:]:
            yield computed(known[0], numbers, status="ok", reason=None, topic="longest")


def _published(rows: Rows, results: Results) -> Rows:
    """Published peaks, each with the one measured here where size, context and precision agree.
    A published forward pass is one that keeps its graph."""
    found = []
    for row in records(select(results.rows, chapter="published", topic="memory")):
        mode = {"forward": "forward_graph"}.get(row["mode"], row["mode"])
        point = {**{key: row[key] for key in ("size", "context", "precision")}, "mode": mode}
        here = select(rows, quantity="peak_memory", status="ok", **TIMELINE, **point)
        base = {**point, "gpu": row["gpu"], "writeup": row["writeup"]}
        base |= {"chapter": "memory", "status": "ok", "unit": "B"}
        found.append({**base, "quantity": "published", "value": row["value"] * GIB})
        found += [{**base, "quantity": "measured_here", "value": v} for v in here["value"][:1]]
    return table_of(found)


def largest(rows: Rows) -> Rows:
    """Rows of the largest training step that was measured, in both precisions if there are two."""
    steps = select(rows, quantity="bf16_ratio", **STEP)
    if steps.empty:
        steps = select(rows, quantity="peak_memory", status="ok", **STEP)
    last = steps.tail(1)
    return select(rows, **TIMELINE, size=list(last["size"]), context=list(last["context"]))


def _at(rows: Rows, field: str) -> Rows:
    """Rows with a column `at`: their size and one more field."""
    before = "context " if field == "context" else ""
    return rows.assign(at=rows["size"] + ", " + before + rows[field].astype(str))


def front_strategies(rows: Rows) -> Rows:
    """One point for the front page: the segments with the lowest peaks, none, and nested."""
    rows = select(rows, source=checkpointed_points(rows)[:1])
    every = select(rows, quantity="peak_memory", kind="every", status="ok")
    lowest = every.sort_values("value", key=pd.to_numeric, kind="stable").head(FRONT_SEGMENTS)
    return select(rows, variant=["none", "nested", *lowest["variant"]])


def checkpointed_points(rows: Rows) -> list[str]:
    """Points with timed strategies; first those where the step fits without checkpointing too, the
    longest step, which waits least for the host, in front."""
    times = select(rows, quantity="time", clock="wall", status="ok", **CHECKPOINTING)
    plain = select(times, variant="none").sort_values("value", ascending=False)
    return list(dict.fromkeys([*plain["source"], *times["source"]]))


def slowdowns(rows: Rows, clock: str) -> dict[tuple[str, str], Pair]:
    """Each strategy's step against the baseline of its point, in paired rounds of one job. The
    baseline is no checkpointing, or the input of every block where that does not fit."""
    found = {}
    times: Any = {"on": ["source"], "where": {"quantity": "time", "clock": clock}}
    for source in checkpointed_points(rows):
        steps = select(rows, status="ok", source=source, **times["where"])
        names = list(steps["variant"])
        baseline = next((name for name in ("none", "every-1", *names) if name in names), None)
        for name in names:
            pair = Compare(variant={"variant": name}, baseline={"variant": baseline}, **times)
            found[source, name] = pair.run(steps)[0]
    return found


def shown(slowdown: Pair) -> str:
    """The slowdown, or the verdict where it is none."""
    if slowdown.variant["variant"] == slowdown.baseline["variant"]:
        return times(1.0)
    ends = " to ".join(times(1 / end) for end in reversed(slowdown.ends))
    return ends if slowdown.decided else slowdown.verdict


def largest_runs(results: Results, **where: Any) -> Rows:
    """Recorded runs of the largest size, in one precision."""
    runs = one_precision(select(results.rows, quantity="peak_memory", status="ok", **where))
    return select(runs, size=list(runs["size"])[-1:])


def timeline_rows(results: Results) -> Rows:
    """A training step of the largest size, at its shortest and longest context."""
    steps = largest_runs(results, **STEP)
    return _curves(results, select(steps, context=_ends(steps)), "{point}")


def mode_rows(results: Results) -> Rows:
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


def composition_rows(results: Results) -> Rows:
    """Parts of the peak of the largest sizes, at the shortest and longest context that all fit."""
    parts = select(results.rows, quantity="part", part=lambda name: name != "peak", **STEP)
    parts = select(parts, size=list(parts["size"].unique()[-COMPARED_SIZES:]))
    runs = parts.groupby("context")["source"].nunique()
    parts = select(parts, context=_ends(parts[parts["context"].map(runs) == runs.max()]))
    return parts.assign(bar=parts["size"] + "\n" + parts["precision"])


def _ends(rows: Rows) -> list[Any]:
    return [rows["context"].min(), rows["context"].max()]


def one_precision(rows: Rows) -> Rows:
    """Rows in fp32 where that was measured, else in another precision."""
    first = min(rows["precision"].unique(), key=lambda name: name != "fp32", default=None)
    return select(rows, precision=first)


def operations(rows: Rows) -> Rows:
    """The largest operations of each block, by what they save."""
    rows = select(rows, quantity="saved_by_operation", **BLOCK)
    rank = rows.groupby("source")["value"].rank(ascending=False, method="first")
    return rows[rank <= LARGEST_OPERATIONS]


def _by_mode(name: str, format: str) -> dict[str, Any]:
    return {
        f"{title}, {p}": quantity(name, format, mode=mode, precision=p)
        for mode, title in MODES.items()
        for p in PRECISIONS
    }


STRATEGY_COLUMNS = {
    "peak (GiB)": memory(),
    "step (ms)": time(),
    "device (ms)": time(clock="device"),
    "device, relative": quantity("relative_time", "text", "shown", clock="device"),
}
BY_CONTEXT: Any = {"rows": ["size", "context"], "where": TIMELINE}
ACROSS: Any = {"rows": ["size"], "data": one_precision}
BY_POINT: Any = {"rows": ["variant"], "headers": {"variant": "strategy"}}
TABLES = {
    "front_peaks": Table(
        title="Peak of a training step, {precision}, in GiB and its phase, by context length",
        where=STEP,
        columns={"{context}": quantity("peak_with_phase", "text")},
        **ACROSS,
    ),
    "front_parts": Table(
        title="What exists at the peak of that step",
        rows=["part"],
        where=STEP,
        data=largest,
        columns={f"{p} (GiB)": quantity("part", "GiB", precision=p) for p in PRECISIONS},
    ),
    "front_strategies": Table(
        title="Training step of {point}; nested: halves within halves",
        data=front_strategies,
        columns=STRATEGY_COLUMNS,
        **BY_POINT,
    ),
    "longest": Table(
        title="Longest context whose training step fits, of those tried here, and what the cost "
        "model predicts for the next",
        rows=["size", "batch", "precision"],
        where={"topic": "longest"},
        columns={
            "context": quantity("longest_context", "integer"),
            "peak (GiB)": memory("longest_peak"),
            "next context": quantity("next_context", "integer"),
            "predicted (GiB)": memory("next_peak"),
        },
    ),
    "long_context": Table(
        title="One sequence: peak of a training step in GiB and its phase, by context length",
        rows=["size", "precision"],
        where=LONG,
        data=lambda rows: rows if len(select(rows, status="ok", **LONG)) else rows.head(0),
        columns={"{context}": quantity("peak_with_phase", "text")},
    ),
    "operations": Table(
        title="Largest operations by what they save for backward, one block of {point}",
        rows=["operation", "origin", "count"],
        data=operations,
        columns={
            "saved (MiB)": quantity("saved_by_operation", "MiB"),
            "share": quantity("saved_by_operation", "percent", field="share"),
        },
    ),
    "block": Table(
        title="One block: what it saves for backward, eager and compiled, and its gradients (MiB)",
        rows=["size", "context", "precision"],
        where=BLOCK,
        columns={
            "saved, eager": quantity("saved_for_backward", "MiB", variant="eager"),
            "saved, predicted": quantity("predicted_saved", "MiB"),
            "saved, compiled": quantity("saved_for_backward", "MiB", variant="compiled"),
            "compiled / eager": quantity("compiled_to_eager", "times"),
            "peak, eager": quantity("peak_memory", "MiB", variant="eager"),
            "peak, compiled": quantity("peak_memory", "MiB", variant="compiled"),
            "gradients": quantity("gradients", "MiB", variant="eager"),
            "gradients, expected": quantity("expected_gradients", "MiB"),
        },
    ),
    "peaks": Table(title="Peak memory (GiB)", columns=_by_mode("peak_memory", "GiB"), **BY_CONTEXT),
    "phases": Table(
        title="Phase that holds the peak of a training step, by context length",
        rows=["size", "precision"],
        where=STEP,
        columns={"{context}": quantity("phase_of_peak", "text")},
    ),
    "composition": Table(
        title="What exists at the peak (GiB), {at}",
        rows=["run", "context"],
        where=TIMELINE,
        data=lambda rows: _at(select(rows, size=list(largest(rows)["size"])[:1]), "precision"),
        columns={name: quantity("part", "GiB", part=name) for name in PARTS.values()},
    ),
    "allocations": Table(
        title="Largest allocations of a forward pass that keeps its graph, {point}; equal ones "
        "share a row",
        rows=["what", "category", "origin", "count"],
        where={**TIMELINE, "mode": "forward_graph", "phase": "forward"},
        data=largest,
        columns={
            "each (MiB)": quantity("allocation", "MiB"),
            "together (GiB)": quantity("allocation", "GiB", field="total_bytes"),
        },
    ),
    "stream": Table(
        title="One fp32 tensor of the residual stream in MiB, by context length",
        where=TIMELINE,
        columns={"{context}": quantity("stream_bytes", "MiB")},
        **ACROSS,
    ),
    "layers": Table(
        title="Memory of the device after a training step of {at} (GiB)",
        rows=["layer"],
        where={**STEP, "stage": "after"},
        data=lambda rows: _at(
            largest(rows).assign(layer=lambda found: found["layer"].map(LAYERS)), "context"
        ),
        columns={p: memory("device_memory", precision=p) for p in PRECISIONS},
    ),
    "predictions": Table(
        title="Relative error of predicted peaks",
        columns=_by_mode("prediction_error", "percent"),
        **BY_CONTEXT,
    ),
    "strategies": Table(
        title="Training step of {point}",
        where={**CHECKPOINTING, "variant": lambda name: name != BEST_PREDICTED},
        columns={
            **STRATEGY_COLUMNS,
            "step, relative": quantity("relative_time", "text", "shown", clock="wall"),
            "left by forward (GiB)": memory("saved_for_backward"),
            "predicted peak (GiB)": memory("predicted_peak"),
            "error": quantity("prediction_error", "percent"),
        },
        **BY_POINT,
    ),
    "published": Table(
        title="Published peaks on other GPUs (batch not stated) and the peak measured here",
        rows=["gpu", "size", "context", "precision", "run"],
        columns={"published (GiB)": memory("published"), "here (GiB)": memory("measured_here")},
    ),
}


AREA: Any = {
    "mark": "area",
    "facet": "point",
    "color": "category",
    "names": {name: name for name in CURVES.values() if name != "peak"},
    "x": Axis(
        field="position",
        title="phases begin at the ticks; each is drawn equally wide",
        ticks={phase: number for number, phase in enumerate(PHASES)},
    ),
    "y": Axis("GiB", scale=1 / GIB),
    "share_x": True,
}
FIGURES = {
    "timeline": Figure(title="Memory during one training step", data=timeline_rows, **AREA),
    "modes": Figure(
        title="Memory of a forward pass and of a training step", data=mode_rows, **AREA
    ),
    "composition": Figure(
        title="What exists at the peak of a training step",
        mark="stack",
        facet="context",
        facet_title="context {}",
        color="part",
        x=Axis(field="bar", title="size and precision", categorical=True),
        y=Axis("GiB", scale=1 / GIB),
        data=composition_rows,
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


def facts(chapter: Chapter) -> dict[str, Any]:
    rows = select(chapter.own.rows, status="ok")
    steps = select(rows, quantity="peak_memory", **STEP)
    ratios = select(rows, quantity="bf16_ratio", **STEP)
    errors = select(rows, quantity="prediction_error", topic=ANY_STEP["topic"])
    in_steps = select(errors, **ANY_STEP)
    shown = records(select(largest(rows), quantity="part", **STEP))
    phases = select(rows, quantity="peak_phase", **ANY_STEP).set_index("source")["value"]
    expected = select(rows, quantity="predicted_peak", source=list(in_steps["source"]), **ANY_STEP)
    return {
        "steps": len(steps),
        "largest": _highest(steps),
        "phases": {
            phase: sorted(select(rows, quantity="peak_phase", value=phase, **STEP)["context"])
            for phase in PHASES
        },
        "attention": sorted(set(steps["attention"])),
        "shown": shown[0] if shown else None,
        "parts": {
            p: {row["category"]: row["value"] for row in shown if row["precision"] == p}
            for p in PRECISIONS
        },
        "ratios": len(ratios),
        "smaller": int((ratios["value"] < 1 - SMALLEST_DIFFERENCE).sum()),
        "greater": int((ratios["value"] > 1 + SMALLEST_DIFFERENCE).sum()),
        "replay_equal": list(select(rows, quantity="replay_equal")["value"]),
        "block": _one(rows, quantity="saved_for_backward", variant="eager", **BLOCK),
        "errors": len(in_steps),
        "worst_error": _highest(errors, key=abs),
        "worst_step": _highest(in_steps, key=abs),
        "same_phase": int((expected["phase"] == expected["source"].map(phases)).sum()),
        "checkpointing": [
            strategy_facts(select(chapter.own.rows, source=source))
            for source in checkpointed_points(rows)
        ],
    }


def strategy_facts(rows: Rows) -> dict[str, Any]:
    """One model under its strategies: the lowest peak, no checkpointing, nesting, and times."""
    peaks = select(rows, quantity="peak_memory", status="ok", kind=["every", "nested"])
    every = select(peaks, kind="every")
    best = _highest(every if len(every) else peaks, key=lambda peak: -peak)
    live = records(select(rows, quantity="predicted_live", kind="every"))
    parts = {r["category"]: r["value"] for r in live if best and r["variant"] == best["variant"]}
    return {
        "point": records(rows)[0],
        "best": best,
        "none": _one(rows, quantity="peak_memory", variant="none"),
        "predicted_none": _one(rows, quantity="predicted_peak", variant="none"),
        "predicted_best": _one(rows, quantity="predicted_peak", variant=BEST_PREDICTED),
        "nested": _one(rows, quantity="peak_memory", variant="nested", status="ok"),
        "late": parts.get("gradients", 0) > LATE_IN_BACKWARD * parts.get("parameters", 1)
        and parts["activations"] > 0,
        "slowdowns": {  # by device time, where there is any
            name: pair
            for clock in ("wall", "device")
            for (_, name), pair in slowdowns(rows, clock).items()
        },
    }


def _highest(rows: Rows, key: Any = float) -> dict[str, Any] | None:
    """The row with the highest value, or the highest by `key`."""
    return max(records(rows), key=lambda row: key(row["value"]), default=None)


def _one(rows: Rows, **where: Any) -> dict[str, Any] | None:
    return next(iter(records(select(rows, **where))), None)
