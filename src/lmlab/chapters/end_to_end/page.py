"""Step times: by size and context, host against GPU, fp32 against bf16, and what warm-up does."""

from __future__ import annotations

import statistics
from functools import partial
from typing import Any

import pandas as pd

from lmlab.report.compare import Compare
from lmlab.report.figure import Axis, Figure, value_axis
from lmlab.report.frame import Results, Rows, combine, distinct, extremes, select
from lmlab.report.frame import derive as derived
from lmlab.report.page import Chapter
from lmlab.report.table import Table, quantity, time

TITLE = "End to end"

WARM = {"start": "warm"}
STEP = {**WARM, "mode": "train_step"}
POINT = ["size", "context", "precision"]
# Below this share of wall time the GPU waits for the host; above the other the host runs ahead.
HOST_BOUND_BELOW, GPU_BOUND_FROM = 0.80, 0.95
# A step is settled once no later one is more than this above the process's final pace.
SETTLED_WITHIN = 0.10


def derive(rows: Rows, results: Results) -> Rows:
    """Per-layer times, busy share, rates and utilization next to what was measured."""
    for clock in ("wall", "device"):
        passes = {p: {**STEP, **times(clock, p)} for p in ("forward", "backward")}
        rows = combine(rows, "both", passes, lambda p: p.forward + p.backward, unit="ms")
        both = {"quantity": "both", "clock": clock}
        rows = derived(rows, "per_layer", both, lambda found: found.value / found.num_layers)
    for phase in ("forward", "backward", "optimizer", "total"):
        clocks = {clock: times(clock, phase) for clock in ("device", "wall")}
        rows = combine(rows, "busy_share", clocks, lambda p: (p.device / p.wall).clip(upper=1))
    rows = _with_bottleneck(rows)
    parts = {"total": times("wall", "total"), "tokens": {"quantity": "tokens"}}
    rows = combine(rows, "throughput", parts, lambda p: p.tokens / p.total * 1e3)
    return _utilization(rows, results)


def _with_bottleneck(rows: Rows) -> Rows:
    """A column `bottleneck`: host or GPU by the busy share of the point's training step, a dash
    where that is unknown."""
    shares = select(rows, quantity="busy_share", phase="total", **STEP)
    by_point = {tuple(row[key] for key in POINT): row["value"] for _, row in shares.iterrows()}
    found = [by_point.get(point) for point in rows[POINT].itertuples(index=False, name=None)]
    names = ["-" if s is None else "host" if s < HOST_BOUND_BELOW else "GPU" for s in found]
    return rows.assign(bottleneck=names)


def times(clock: str, phase: str) -> dict[str, str]:
    """The condition for one phase's time."""
    return {"quantity": "time", "clock": clock, "phase": phase}


def _utilization(rows: Rows, results: Results) -> Rows:
    """Matmul FLOPs of a step over its wall time, and as shares of the stated and measured peak."""
    flops = (
        select(rows, quantity="flops", kind="matmul").groupby("source", sort=False)["value"].sum()
    )
    rows = derived(
        rows,
        "rate",
        {**times("wall", "total"), "source": list(flops.index)},
        lambda found: found.source.map(flops) / found.value / 1e9,
        unit="TFLOP/s",
    )
    for name, peak in (("mfu", "stated_matmul_rate"), ("measured_mfu", "matmul_rate")):
        peaks = select(results.rows, chapter="machine", quantity=peak, status="ok")
        by_dtype = dict(zip(peaks["dtype"], peaks["value"], strict=True)) if len(peaks) else {}
        known = {"quantity": "rate", "precision": list(by_dtype)}
        rows = derived(rows, name, known, partial(_share_of, by_dtype))
    return rows


def _share_of(peaks: dict[str, float], found: Rows) -> Any:
    return found.value / found.precision.map(peaks)


def first_steps(results: Results) -> Rows:
    """Every step of a cold process in order: the process without warm-up, as in the table."""
    rows = select(results.rows, start="cold", phase="total", clock="wall")
    found = []
    for (size,) in distinct(rows, ["size"]):
        for samples in select(rows, size=size, warmup=0, quantity="time", status="ok")["samples"]:
            found += [{"size": size, "step": i, "value": ms} for i, ms in enumerate(samples, 1)]
    return pd.DataFrame(found)


def warm_up(rows: Rows) -> Rows:
    """Per size: what the first step costs beyond a settled one, and when the process settles."""
    cold = select(rows, start="cold", phase="total", clock="wall", status="ok")
    found = []
    for (size,) in distinct(cold, ["size"]):
        mine = select(cold, size=size, warmup=0, quantity="time")
        if mine.empty:
            continue
        first = mine.iloc[0].to_dict()
        steps = list(first["samples"])
        pace = statistics.median(steps[len(steps) // 2 :])
        slow = [i for i, ms in enumerate(steps, 1) if ms > (1 + SETTLED_WITHIN) * pace]
        settled = max(slow, default=0) + 1
        numbers = {
            "first_step": steps[0],
            "settled_step": pace,
            "first_step_extra": steps[0] - pace,
            "settles_at": settled if settled <= len(steps) - 2 else None,
            "cold_mean": statistics.mean(steps) / pace - 1,
        }
        for warmup in (0, 5):
            sd = select(cold, size=size, warmup=warmup, quantity="time")["sd"]
            numbers[f"sd_{warmup}"] = None if sd.empty else sd.iloc[0]
        found += [
            {**first, "quantity": name, "value": value, "clock": None}
            for name, value in numbers.items()
            if value is not None
        ]
    return pd.DataFrame(found, columns=[*rows.columns], dtype=object)


def repeatability(rows: Rows) -> Rows:
    """The same work in two processes: forward and backward in two modes, largest over smallest."""
    found = select(
        rows,
        quantity="time",
        status="ok",
        **WARM,
        phase=["forward", "backward"],
        mode=["forward_backward", "train_step"],
    )
    groups: dict[tuple[Any, ...], list[Any]] = {}
    for row in found.to_dict("records"):
        groups.setdefault(tuple(row[key] for key in (*POINT, "phase", "clock")), []).append(row)
    pairs = []
    for group in groups.values():
        if len(group) == 2:
            low, high = sorted(row["value"] for row in group)
            pairs.append({**group[0], "quantity": "disagreement", "value": high / low - 1})
    return pd.DataFrame(pairs, columns=[*rows.columns], dtype=object)


REPLICATES = {**WARM, "phase": ["forward", "backward"], "mode": ["forward_backward", "train_step"]}


def precision_comparison(precision: str, clock: str, **where: Any) -> Compare:
    """A precision against fp32, between jobs. How much two processes that do the same work differ
    depends on the bottleneck: a busy GPU repeats within 1 %, a host that launches kernels does not.
    """
    return Compare(
        variant={"precision": precision, **where},
        baseline={"precision": "fp32", **where},
        on=["size", "context"],
        where={"quantity": "time", "clock": clock},
        replicates=REPLICATES,
        replicate_keys=[*POINT, "phase"],
        pool=["bottleneck"],
    )


COMPARISONS = {
    "bf16": precision_comparison("bf16", "wall", **STEP, phase="total"),
    "bf16_device": precision_comparison("bf16", "device", **STEP, phase="total"),
    "bf16_forward": precision_comparison("bf16", "wall", **STEP, phase="forward"),
    "bf16_backward": precision_comparison("bf16", "wall", **STEP, phase="backward"),
    "bf16_optimizer": precision_comparison("bf16", "wall", **STEP, phase="optimizer"),
}


def speedups(rows: Rows) -> Rows:
    """bf16 over fp32 as rows: by wall clock and by device time."""
    parts = [
        COMPARISONS[name].run(rows).rows().assign(basis=basis)
        for name, basis in (
            ("bf16", "wall time"),
            ("bf16_device", "device time"),
        )
    ]
    return pd.concat([part for part in parts if not part.empty] or [rows.head(0)])


TABLES = {
    "front_steps": Table(
        title="Training step in milliseconds by context length",
        rows=["size", "precision"],
        across="context",
        columns={"{context}": time(phase="total")},
        where=STEP,
    ),
    "front_layers": Table(
        title="Forward and backward pass of a bf16 training step at the shortest context, "
        "milliseconds per layer",
        rows=["size", "num_layers"],
        headers={"num_layers": "layers"},
        columns={
            "wall": quantity("per_layer", "ms", clock="wall"),
            "GPU busy": quantity("per_layer", "ms", clock="device"),
        },
        where={"precision": "bf16"},
        data=lambda rows: select(rows, context=_shortest(rows)),
    ),
    "front_bf16": Table(
        title="Speed-up of a bf16 training step over fp32 by context length",
        rows=["size"],
        across="context",
        data=speedups,
        where={"basis": ["wall time"]},
        columns={"{context}": quantity("speedup", "text", field="speedup")},
    ),
    "front_warm_up": Table(
        title="Cold processes: first and settled training step, and standard deviation over ten "
        "steps without and with five warm-up steps",
        rows=["size"],
        data=warm_up,
        columns={
            "first step (ms)": quantity("first_step", "ms"),
            "settled (ms)": quantity("settled_step", "ms"),
            "settled from step": quantity("settles_at", "integer"),
            "sd, 0 warm-ups (ms)": quantity("sd_0", "ms"),
            "sd, 5 warm-ups (ms)": quantity("sd_5", "ms"),
        },
    ),
    "steps": Table(
        title="Training step by phase, {precision}",
        facet="precision",
        rows=["size", "context"],
        where=STEP,
        columns={
            "forward (ms)": time(phase="forward"),
            "backward (ms)": time(phase="backward"),
            "optimizer (ms)": time(phase="optimizer"),
            "step (ms)": time(phase="total"),
            "GPU busy (ms)": time(phase="total", clock="device"),
        },
    ),
    "modes": Table(
        title="Forward pass alone, and forward and backward without an optimizer, {precision}",
        facet="precision",
        rows=["size", "context"],
        where=WARM,
        columns={
            "inference forward (ms)": time(mode="forward", phase="total"),
            "forward (ms)": time(mode="forward_backward", phase="forward"),
            "backward (ms)": time(mode="forward_backward", phase="backward"),
            "both (ms)": time(mode="forward_backward", phase="total"),
            "mean": time(mode="forward_backward", phase="total", field="mean"),
            "sd": time(mode="forward_backward", phase="total", field="sd"),
        },
    ),
    "rates": Table(
        title="Throughput and utilization of a training step, {precision}",
        facet="precision",
        rows=["size", "context"],
        where=STEP,
        columns={
            "tokens/s": quantity("throughput", "integer"),
            "TFLOP/s": quantity("rate"),
            "of stated peak": quantity("mfu", "percent"),
            "of measured matmul": quantity("measured_mfu", "percent"),
            "GPU busy": quantity("busy_share", "percent", phase="total"),
            "peak memory (GiB)": quantity("peak_memory", "GiB"),
        },
    ),
    "layers": Table(
        title="Forward and backward per layer within a training step, {precision}",
        facet="precision",
        rows=["size", "context"],
        where=STEP,
        columns={
            "wall (ms per layer)": quantity("per_layer", "ms", clock="wall"),
            "GPU busy (ms per layer)": quantity("per_layer", "ms", clock="device"),
            "forward busy": quantity("busy_share", "percent", phase="forward"),
            "backward busy": quantity("busy_share", "percent", phase="backward"),
            "optimizer busy": quantity("busy_share", "percent", phase="optimizer"),
        },
    ),
    "speedups": Table(
        title="Speed-up of a bf16 training step over fp32, {basis}",
        facet="basis",
        rows=["size"],
        across="context",
        data=speedups,
        columns={"{context}": quantity("speedup", "text", field="speedup")},
    ),
    "warm_up": Table(
        title="Cold processes: mean of ten steps after so many warm-up steps",
        rows=["size"],
        across="warmup",
        where={"start": "cold", "phase": "total"},
        columns={"{warmup} (ms)": quantity("time", "ms", field="mean", clock="wall")},
    ),
    "published": Table(
        title="Published on other GPUs (batch 4, eager, mean of steps after 5 warm-ups)",
        chapter="published",
        rows=["gpu", "size", "context", "precision"],
        where={"topic": "end_to_end", "batch": 4, "compile": "no", "warmup": 5},
        columns={
            "forward (ms)": quantity("published", "ms", phase="forward"),
            "backward (ms)": quantity("published", "ms", phase="backward"),
            "both (ms)": quantity("published", "ms", phase="forward_backward"),
        },
    ),
}

FIGURES = {
    "time_by_context": Figure(
        title="Training step by context length",
        mark="line",
        facet="precision",
        color="size",
        x=Axis(field="context", title="context length", log=2),
        y=value_axis("ms per step", log=10),
        where={
            "chapter": "end_to_end",
            "quantity": "time",
            "clock": "wall",
            "phase": "total",
            **STEP,
        },
    ),
    "per_layer": Figure(
        title="Forward and backward per layer in a bf16 training step: wall and device time",
        mark="line",
        facet="clock",
        color="size",
        facet_title="{} time",
        x=Axis(field="context", title="context length", log=2),
        y=value_axis("ms per layer"),
        where={"quantity": "per_layer", "precision": "bf16"},
    ),
    "first_steps": Figure(
        title="First steps of a fresh process",
        mark="line",
        color="size",
        x=Axis(field="step", title="step"),
        y=value_axis("ms per step", log=10),
        data=first_steps,
    ),
}


def facts(chapter: Chapter) -> dict[str, Any]:
    """What the sentences of the page need."""
    rows = select(chapter.own.rows, status="ok")
    steps = select(rows, **times("wall", "total"), **STEP)
    device = select(rows, **times("device", "total"), **STEP)
    layers = select(rows, quantity="per_layer", precision="bf16", context=_shortest(rows))
    busy = select(rows, quantity="busy_share", phase="total", **STEP)
    warm = warm_up(rows)
    return {
        "steps": {
            p: extremes(select(steps, precision=p)) for (p,) in distinct(steps, ["precision"])
        },
        "device": {
            precision: extremes(select(device, precision=precision))
            for (precision,) in distinct(device, ["precision"])
        },
        "contexts": [context for (context,) in distinct(steps, ["context"])],
        "layers_wall": _range(select(layers, clock="wall")),
        "layers_device": _range(select(layers, clock="device")),
        "host_bound": _points(busy[busy["value"] < HOST_BOUND_BELOW]),
        "gpu_bound": _points(busy[busy["value"] >= GPU_BOUND_FROM]),
        "busy_points": len(busy),
        "host_bound_bf16": len(
            select(busy, precision="bf16", value=lambda share: share < HOST_BOUND_BELOW)
        ),
        "bf16_points": len(select(busy, precision="bf16")),
        "mfu": {
            p: extremes(select(rows, quantity="mfu", precision=p, **STEP)) for p in ("fp32", "bf16")
        },
        "first_step_extra": _range(select(warm, quantity="first_step_extra")),
        "settles_at": sorted(set(select(warm, quantity="settles_at")["value"])),
        "cold_mean": _ends(select(warm, quantity="cold_mean")),
        "unsettled": len(distinct(warm, ["size"])) - len(select(warm, quantity="settles_at")),
        "disagreement": {
            clock: _quantiles(select(repeatability(rows), clock=clock)["value"])
            for clock in ("wall", "device")
        },
    }


def _shortest(rows: Rows) -> Any:
    contexts = select(rows, quantity="per_layer")["context"].dropna()
    return None if contexts.empty else contexts.min()


def _ends(rows: Rows) -> dict[str, Any] | None:
    """The first and the last row, in the order of the study."""
    if rows.empty:
        return None
    return {"first": rows.iloc[0].to_dict(), "last": rows.iloc[-1].to_dict()}


def _range(rows: Rows) -> tuple[float, float] | None:
    return None if rows.empty else (min(rows["value"]), max(rows["value"]))


def _points(rows: Rows) -> list[dict[str, Any]]:
    return [dict(zip(POINT, point, strict=True)) for point in distinct(rows, POINT)]


def _quantiles(values: Any) -> dict[str, float] | None:
    numbers = pd.to_numeric(values)
    if numbers.empty:
        return None
    return {
        "count": len(numbers),
        "median": numbers.median(),
        "worst": numbers.max(),
        "within": float((numbers <= 0.03).mean()),
    }
