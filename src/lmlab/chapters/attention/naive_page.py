"""Naive attention: times, measured and predicted memory, the longest sequence; and its softmax."""

from typing import Any

import pandas as pd

from lmlab.chapters.attention import naive_memory
from lmlab.chapters.machine.page import kernel_time
from lmlab.report.figure import Axis, Figure
from lmlab.report.frame import Results, Rows, combine, records, select, table_of
from lmlab.report.table import Table, memory, quantity, speedup, time
from lmlab.report.text import GIB

NAIVE, COMPILED = "naive", "compiled"
DIRECTIONS = ("forward", "backward")
WRITTEN_OUT = ("max", "subtract", "exp", "sum", "divide")
COPIED = ("chapter", "source", "topic", "precision", "head_dim", "sequence")


def with_softmax(rows: Rows) -> Rows:
    """Add ratios of fused and written-out softmax to the two matmuls of attention."""
    time_of = {"topic": "softmax", "quantity": "time"}
    parts = {part: {**time_of, "part": part} for part in ("softmax", "scores", "output")}
    steps = {part: {**time_of, "part": part} for part in WRITTEN_OUT}
    rows = combine(rows, "matmuls", parts, lambda p: p.scores + p.output)
    rows = combine(rows, "written_out", steps, lambda p: p.sum(axis=1))
    both = {name: {"quantity": name} for name in ("matmuls", "written_out")}
    fused = {"fused": parts["softmax"], **both}
    rows = combine(rows, "fused_to_matmuls", fused, lambda p: p.fused / p.matmuls)
    rows = combine(rows, "written_to_matmuls", both, lambda p: p.written_out / p.matmuls)
    return combine(rows, "written_to_fused", fused, lambda p: p.written_out / p.fused)


def expected_memory(rows: Rows) -> Rows:
    """Memory predicted for naive attention, at every shape of the study, measured or not."""
    found = []
    for point in records(select(rows, topic="naive").drop_duplicates("source")):
        base = {**{key: point[key] for key in COPIED}, "status": "ok", "flags": ()}
        for stage, tensor, count in naive_memory.account(point):
            own = {"quantity": "expected_memory", "stage": stage, "tensor": tensor, "value": count}
            found.append({**base, **own})
    return table_of(found)


def extreme_naive(rows: Rows, status: str) -> dict[str, Any] | None:
    """The shortest sequence at which naive attention ran out of memory, or the longest it ran."""
    found = select(rows, topic="naive", status=status)
    found = found[found["variant"].eq(NAIVE) | found["quantity"].isna()]
    ordered = records(found.sort_values(["sequence", "head_dim"], key=pd.to_numeric))
    return ordered[-1 if status == "ok" else 0] if ordered else None


def shown_naive(rows: Rows) -> Rows:
    """Naive attention at one head dimension: where a sequence did not fit, else the largest."""
    shape = extreme_naive(rows, "oom") or extreme_naive(rows, "ok")
    if shape is None:
        return rows.head(0)
    title = "{precision}, batch {batch}, head dim {head_dim}".format(**shape)
    found = select(rows, topic="naive", head_dim=shape["head_dim"])
    return found.assign(shape=title, reason=None)  # why it does not fit is in the text


def accounts(rows: Rows) -> Rows:
    """Memory by tensor at the smallest shape that does not fit and the largest that does."""
    points = [point for status in ("oom", "ok") if (point := extreme_naive(rows, status))]
    titles = {p["source"]: f"head dim {p['head_dim']}, sequence {p['sequence']:,}" for p in points}
    rows = select(rows, source=list(titles)).assign(shape=lambda found: found["source"].map(titles))
    measured = select(rows, quantity="memory", variant=NAIVE).assign(tensor="measured")
    found = pd.concat([select(rows, quantity="expected_memory"), measured])
    found["quantity"] = "memory"
    return found.sort_values("tensor", key=lambda x: x.isin(["sum", "measured"]), kind="stable")


def panels(results: Results) -> Rows:
    """Times and peak memory at the smallest and the largest head dimension."""
    rows = select(results.rows, topic="naive", status="ok", variant=[NAIVE, COMPILED])
    rows = select(rows, head_dim=[rows["head_dim"].min(), rows["head_dim"].max()])
    rows = rows.assign(dim=rows["head_dim"].map("head dim {}".format))
    peaks = select(rows, quantity="memory", stage="peak")
    found = {f"{name} (ms)": select(rows, quantity="time", phase=name) for name in DIRECTIONS}
    found["peak memory (GiB)"] = peaks.assign(value=peaks["value"] / GIB)
    return pd.concat([mine.assign(panel=panel) for panel, mine in found.items()])


def facts(rows: Rows) -> dict[str, Any] | None:
    """The longest sequence that fits, the first that does not, and measured over predicted peak."""
    largest, full = extreme_naive(rows, "ok"), extreme_naive(rows, "oom")
    if largest is None:
        return None
    peaks = select(rows, quantity=["expected_memory", "memory"], stage="peak")
    mine = select(peaks, source=(full or largest)["source"])
    scores = select(mine, tensor=list(naive_memory.SCORES))["value"]
    there = select(peaks, source=largest["source"])
    found = select(there, variant=NAIVE)["value"].sum()
    return {
        "largest": largest,
        "full": full,
        "need": select(mine, tensor="sum")["value"].sum(),
        "scores": len(scores),
        "score_bytes": scores.max(),
        "agreement": found / select(there, tensor="sum")["value"].sum(),
    }


PASSES = {f"{name} (ms)": time(phase=name) for name in DIRECTIONS}
PEAK = memory("memory", "MiB", stage="peak")
BY_SHAPE = ["head_dim", "sequence"]
SOFTMAX: Any = {"rows": ["size", "context"], "where": {"topic": "softmax"}}
TABLES = {
    "front_naive": Table(
        title="Naive attention, eager, {shape}",
        rows=["sequence"],
        where={"variant": NAIVE},
        data=shown_naive,
        columns=PASSES | {"peak (GiB)": memory("memory", stage="peak")},
    ),
    "naive": Table(
        title="Naive attention, eager",
        rows=BY_SHAPE,
        where={"topic": "naive", "variant": NAIVE},
        columns={
            **PASSES,
            "saved (MiB)": memory("saved_memory", "MiB"),
            "before backward (MiB)": memory("memory", "MiB", stage="before_backward"),
            "peak (MiB)": PEAK,
        },
    ),
    "account": Table(
        title="Memory of naive attention in GiB by its formula: {shape}",
        rows=["tensor"],
        data=accounts,
        columns={
            "forward peak": memory("memory", stage="forward_peak"),
            "before backward": memory("memory", stage="before_backward"),
            "backward peak": memory("memory", stage="peak"),
        },
    ),
    "compiled_naive": Table(
        title="Naive attention, compiled, and its speed-up over eager in the same process",
        rows=BY_SHAPE,
        where={"topic": "naive", "variant": COMPILED},
        columns={
            **PASSES,
            **{f"{name}, speed-up": speedup(phase=name) for name in DIRECTIONS},
            "peak (MiB)": PEAK,
            "first call (s)": quantity("first_call_time", "s"),
        },
    ),
    "softmax": Table(
        title="Softmax against the two matmuls of attention, {precision}",
        **SOFTMAX,
        columns={
            "QKᵀ and PV (ms)": quantity("matmuls", "ms"),
            "softmax, fused (ms)": kernel_time(part="softmax"),
            "written out (ms)": quantity("written_out", "ms"),
            "fused / matmuls": quantity("fused_to_matmuls"),
            "written out / matmuls": quantity("written_to_matmuls"),
            "written out / fused": quantity("written_to_fused", "times"),
        },
    ),
    "softmax_parts": Table(
        title="Operations of naive attention, milliseconds, {precision}",
        **SOFTMAX,
        columns={"{part}": kernel_time()},
    ),
}
FIGURES = {
    "naive": Figure(
        title="Naive attention by sequence: time and peak memory",
        facet="panel",
        color="attention",
        dash="dim",
        x=Axis(field="sequence", title="sequence", log=2),
        y=Axis("", log=10),
        share_y=False,
        data=panels,
    )
}
