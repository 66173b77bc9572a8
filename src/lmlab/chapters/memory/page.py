"""Where the memory peak is, what it consists of, what bf16 changes, what checkpointing buys."""

from collections.abc import Iterator
from typing import Any

import pandas as pd

from lmlab.chapters.memory import checkpointing_page, figures_page
from lmlab.chapters.memory.checkpointing_page import CHECKPOINTING, relative_times
from lmlab.chapters.memory.figures_page import PARTS, PHASES, STEP, TIMELINE, one_precision
from lmlab.report.frame import Results, Rows, combine, computed, highest, records, select, table_of
from lmlab.report.page import Chapter
from lmlab.report.table import Table, memory, quantity
from lmlab.report.text import FORMATS, GIB
from lmlab.report.verdict import SMALLEST_DIFFERENCE

TITLE = "Memory"
FIGURES = figures_page.FIGURES

LONG, BLOCK = {"topic": "long_context"}, {"topic": "block"}
ANY_STEP: Any = {"mode": "train_step", "topic": ["timeline", "long_context"]}
MODES = {
    "forward": "forward without graph",
    "forward_graph": "forward with graph",
    "train_step": "training step",
}
PRECISIONS = ("fp32", "bf16")
VARIANTS = ("eager", "compiled")
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
LARGEST_OPERATIONS = 5


def derive(rows: Rows, results: Results) -> Rows:
    """Sort by size and add the parts of each peak, bf16 / fp32 ratios and prediction errors."""
    rows = rows.reindex(columns=list(dict.fromkeys([*rows.columns, *COLUMNS])))
    rows = rows.sort_values(["d_model", "num_layers", "context"], kind="stable", ignore_index=True)
    rows = pd.concat([rows, table_of([*_parts(rows)]), _peaks_with_phase(rows)], ignore_index=True)
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
    more = [*_longest(rows, results), _published(rows, results), *relative_times(rows)]
    rows = pd.concat([rows, *more], ignore_index=True)
    named = rows["size"] + ", context " + rows["context"].astype(str) + ", " + rows["precision"]
    return rows.assign(run=[MODES.get(mode, mode) for mode in rows["mode"]], point=named)


def _parts(rows: Rows) -> Iterator[dict[str, Any]]:
    """Live bytes at the peak by part, attention weights apart from the other activations."""
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
        for category, part in PARTS.items():
            yield {**base, "category": category, "part": part, "value": counts[category]}


def _peaks_with_phase(rows: Rows) -> Rows:
    """Peaks of training steps as text: GiB and phase; a step that did not fit keeps its status."""
    phases = select(rows, quantity="peak_phase", **ANY_STEP).set_index("source")["value"]
    peaks = select(rows, quantity="peak_memory", **ANY_STEP)
    phase = peaks["source"].map(phases)
    size = peaks["value"].fillna(0).map(FORMATS["GiB"])
    # A one-word reason is printed in the cell; other tables of the chapter explain it.
    peaks = peaks.assign(reason=peaks["reason"].mask(peaks["status"] == "oom", "OOM"))
    with_phase = peaks.assign(quantity="peak_with_phase", value=size + " " + phase.astype(str))
    return pd.concat([with_phase, peaks.assign(quantity="phase_of_peak", value=phase)])


def _longest(rows: Rows, results: Results) -> Iterator[Rows]:
    """The longest context whose step fits, and the predicted peak of the shortest that does not."""
    # The result of a point at which every mode failed keeps its records as data.
    failed = {path: r.data["records"] for path, r in results.results.items() if "records" in r.data}
    points = records(select(rows, source=list(failed)))
    kept = ((point, record) for point in points for record in failed[point["source"]])
    rows = pd.concat([rows, table_of([{**point, **r, **r["labels"]} for point, r in kept])])
    steps = select(rows, quantity="peak_memory", **ANY_STEP)
    needs = select(rows, quantity="predicted_peak", **ANY_STEP).set_index("source")["value"]
    for _, group in steps.groupby(["size", "batch", "precision"], sort=False):
        ordered = group.sort_values("context", kind="stable")
        fits, fails = (records(select(ordered, status=s)) for s in (["ok"], ["oom", "unsupported"]))
        numbers: dict[str, Any] = {}
        if fits:
            numbers |= {"longest_context": fits[-1]["context"], "longest_peak": fits[-1]["value"]}
        if fails:
            need = needs.get(fails[0]["source"])
            numbers |= {"next_context": fails[0]["context"], "next_peak": need}
        if known := fails[:1] or fits[-1:]:
            yield computed(known[0], numbers, status="ok", reason=None, topic="longest")


def _published(rows: Rows, results: Results) -> Rows:
    """Published peaks, each with the peak measured here for the same size, context and precision.
    A published forward pass keeps its graph."""
    point = ["size", "context", "precision", "mode"]
    theirs = select(results.rows, chapter="published", topic="memory")
    theirs = theirs.reindex(columns=["chapter", "status", *point, "gpu", "writeup", "value"])
    theirs = theirs.assign(chapter="memory").replace({"mode": {"forward": "forward_graph"}})
    ours = select(rows, quantity="peak_memory", status="ok", **TIMELINE).drop_duplicates(point)
    here = theirs.drop(columns="value").merge(ours[[*point, "value"]], on=point)
    there = theirs.assign(quantity="published", value=theirs["value"] * GIB)
    return pd.concat([there, here.assign(quantity="measured_here")])


def largest(rows: Rows) -> Rows:
    """Rows of the largest training step that was measured, in both precisions if there are two."""
    steps = select(rows, quantity="bf16_ratio", **STEP)
    if steps.empty:
        steps = select(rows, quantity="peak_memory", status="ok", **STEP)
    last = steps.tail(1)
    return select(rows, **TIMELINE, size=list(last["size"]), context=list(last["context"]))


def _at(rows: Rows, field: str) -> Rows:
    """Add a column `at` that names the size and one more field."""
    before = "context " if field == "context" else ""
    return rows.assign(at=rows["size"] + ", " + before + rows[field].astype(str))


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


BY_CONTEXT: Any = {"rows": ["size", "context"], "where": TIMELINE}
ACROSS: Any = {"rows": ["size"], "data": one_precision}
TABLES = {
    **checkpointing_page.TABLES,
    "front_peaks": Table(
        title="Peak of a training step, {precision}, in GiB and its phase, by context length",
        where=STEP,
        columns={"{context}": quantity("peak_with_phase", "text")},
        **ACROSS,
    ),
    "front_parts": Table(
        title="Composition of the peak of that step",
        rows=["part"],
        where=STEP,
        data=largest,
        columns={f"{p} (GiB)": quantity("part", "GiB", precision=p) for p in PRECISIONS},
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
        title="One block, MiB: saved for backward, peak beyond what was in use, and gradients",
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
        title="Composition of the peak (GiB), {at}",
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
        where={**STEP, "stage": "after", "layer": list(LAYERS.values())},
        data=lambda rows: _at(largest(rows).replace({"layer": LAYERS}), "context"),
        columns={p: memory("device_memory", precision=p) for p in PRECISIONS},
    ),
    "predictions": Table(
        title="Relative error of predicted peaks",
        columns=_by_mode("prediction_error", "percent"),
        **BY_CONTEXT,
    ),
    "published": Table(
        title="Published peaks on other GPUs (batch not stated) and the peak measured here",
        rows=["gpu", "size", "context", "precision", "run"],
        columns={"published (GiB)": memory("published"), "here (GiB)": memory("measured_here")},
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
        "largest": highest(steps),
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
        "block": len(select(rows, quantity="saved_for_backward", **BLOCK)),
        "errors": len(in_steps),
        "worst_error": highest(errors, key=abs),
        "worst_step": highest(in_steps, key=abs),
        "same_phase": int((expected["phase"] == expected["source"].map(phases)).sum()),
        "checkpointing": checkpointing_page.facts(chapter.own.rows),
    }
