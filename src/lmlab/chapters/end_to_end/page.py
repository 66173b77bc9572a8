"""Step times: by size and context, host against GPU, fp32 against bf16, and what warm-up does."""

import statistics
from collections.abc import Iterator
from typing import Any

import pandas as pd

from lmlab.chapters.machine.page import with_rates, with_share
from lmlab.report.compare import Compare, Noise
from lmlab.report.figure import Axis, Figure
from lmlab.report.frame import Results, Rows, at_first, combine, computed, derived, records, select
from lmlab.report.page import Chapter
from lmlab.report.repeat import GPU_BOUND_FROM, WITHIN, agreement
from lmlab.report.table import Table, quantity, speedup, time
from lmlab.report.text import UNSTEADY

TITLE = "End to end"

WARM = {"start": "warm"}
STEP = {**WARM, "mode": "train_step"}
MAIN = {**STEP, "main": True}
"""Training steps of the main grid: the study's first batch, sizes of which a step fits."""
PASSES = ("forward", "backward")
PHASES = (*PASSES, "optimizer")
STEP_PHASES = {**{name: name for name in PHASES}, "total": "step"}
POINT = ["size", "context", "batch", "precision"]
CLOCKS = ("wall", "device")
# Below this busy share the GPU waits for the host.
HOST_BOUND_BELOW = 0.80
# A step is settled once no later one is more than this above the process's final pace.
SETTLED_WITHIN = 0.10


def derive(rows: Rows, results: Results) -> Rows:
    """Add per-layer times, busy share, rates, utilization, graph checks and warm-up figures."""
    sizes = select(rows, status="ok", **STEP)["size"].unique()
    rows = rows.assign(main=rows["size"].isin(sizes) & (rows["batch"] == rows["batch"].iloc[0]))
    passes = {p: {**STEP, "quantity": "time", "phase": p} for p in PASSES}
    clock, phase = ["source", "clock"], ["source", "phase"]
    rows = combine(rows, "both", passes, lambda p: p.forward + p.backward, on=clock)
    rows = derived(rows, "per_layer", {"quantity": "both"}, lambda f: f.value / f.num_layers)
    both = {clock: times(clock, list(STEP_PHASES)) for clock in reversed(CLOCKS)}
    rows = combine(rows, "busy_share", both, lambda p: (p.device / p.wall).clip(upper=1), on=phase)
    rows = _with_bottleneck(rows)
    rows = with_rates(rows, {"throughput": "tokens"}, ["source"], clock="wall", phase="total")
    replay = ("graph_replay_time", "graph_busy_time", "kernels")
    parts = {**{key: {"quantity": key} for key in replay}, "device": times("device", PASSES)}
    for name, value in (  # pauses in microseconds
        ("replay_to_device", lambda p: p.graph_replay_time / p.device),
        ("replay_busy_to_device", lambda p: p.graph_busy_time / p.device),
        ("pause_per_kernel", lambda p: (p.graph_replay_time - p.graph_busy_time) / p.kernels * 1e3),
    ):
        rows = combine(rows, name, parts, value, on=phase)
    return pd.concat([_utilization(rows, results), *warm_up(rows)], ignore_index=True)


def times(clock: Any, phase: Any) -> dict[str, Any]:
    """The condition that selects times of one phase, or of several."""
    return {"quantity": "time", "clock": clock, "phase": phase}


def _with_bottleneck(rows: Rows) -> Rows:
    """A column `bottleneck`: host or GPU by the busy share of a training step, or a dash."""
    shares = select(rows, quantity="busy_share", phase="total", **STEP).set_index(POINT)["value"]
    found = pd.MultiIndex.from_frame(rows[POINT]).map(shares.to_dict().get)
    names = ["-" if pd.isna(s) else "host" if s < HOST_BOUND_BELOW else "GPU" for s in found]
    return rows.assign(bottleneck=names)


def _utilization(rows: Rows, results: Results) -> Rows:
    """Matmul FLOPs of a step over its time, also as shares of the stated and the measured peak."""
    matmuls = select(rows, quantity="flops", kind="matmul")
    work = matmuls.groupby("source", sort=False)["value"].sum()
    step = {**times(list(CLOCKS), "total"), "source": list(work.index)}
    rows = derived(rows, "rate", step, lambda f: f.source.map(work) / f.value / 1e9)
    rows = with_share(rows, "mfu", results, "stated_matmul_rate")
    return with_share(rows, "measured_mfu", results, "matmul_rate")


WARM_UP = "warm-up"
TRAINED = {"phase": WARM_UP, "mode": "train_step"}
COLD = {"start": "cold", "phase": "total", "clock": "wall", "status": "ok", "quantity": "time"}


def first_steps(results: Results) -> Rows:
    """Every step, in order, of each cold process that ran without warm-up."""
    rows = select(results.rows, warmup=0, **COLD).explode("samples", ignore_index=True)
    return rows.assign(step=rows.groupby("source").cumcount() + 1, value=rows["samples"])


def warm_up(rows: Rows) -> Iterator[Rows]:
    """By mode and size: what the first step costs beyond a settled one, and when steps settle."""
    cold = select(rows, **COLD)
    for first in records(select(cold, warmup=0)):
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
        same = select(cold, size=first["size"], mode=first["mode"]).sort_values("warmup")["sd"]
        numbers |= {"sd_cold": first["sd"], "sd_warm": same.iloc[-1] if len(same) > 1 else None}
        yield computed(first, numbers, phase=WARM_UP).dropna(subset="value")


# Two modes run the same forward and backward passes in separate processes.
REPLICATES = {**WARM, "phase": list(PASSES), "mode": ["forward_backward", "train_step"]}
NOISE = Noise(replicates=REPLICATES, keys=[*POINT, "phase"], host_bound_below=HOST_BOUND_BELOW)


def disagreement(rows: Rows) -> Any:
    """Per clock: difference between two replicates of a phase, relative to the smaller."""
    found = select(rows, quantity="time", status="ok", **REPLICATES).astype({"value": float})
    groups = found.groupby([*NOISE.keys, "clock"], sort=False)["value"]
    pairs = groups.agg(["count", "min", "max"]).query("count == 2")
    apart = (pairs["max"] / pairs["min"] - 1).groupby("clock", sort=False)
    within = apart.agg(lambda differences: (differences <= WITHIN).mean())
    found = apart.agg(count="count", median="median", worst="max").assign(within=within)
    return found.to_dict("index")


def bf16_comparison(clock: str, phase: str, mode: str = "train_step") -> Compare:
    """Compare bf16 with fp32 across jobs. Noise is pooled by bottleneck: a busy GPU repeats within
    1 % from process to process, a host that launches kernels does not."""
    bf16, fp32 = ({**WARM, "mode": mode, "phase": phase, "precision": p} for p in ("bf16", "fp32"))
    where, on = {"quantity": "time", "clock": clock}, ["size", "context", "batch"]
    pool = ["bottleneck"]
    return Compare(variant=bf16, baseline=fp32, on=on, where=where, noise=NOISE, pool=pool)


BASES = {"bf16_device": "device time", "bf16": "wall time"}
COMPARISONS = {
    "bf16_device": bf16_comparison("device", "total"),
    "bf16": bf16_comparison("wall", "total"),
    "bf16_optimizer": bf16_comparison("wall", "optimizer"),
    "bf16_forward": bf16_comparison("device", "total", mode="forward"),
}


def speedups(rows: Rows) -> Rows:
    """bf16 over fp32: by device time, which repeats from machine to machine, and by wall clock."""
    found = select(rows, comparison=list(BASES))
    return found.assign(basis=found["comparison"].map(BASES)) if len(found) else found


def graph_checked(rows: Rows) -> Rows:
    """The points that were also replayed as a CUDA graph."""
    replayed = list(select(rows, quantity="graph_replay_time")["source"])
    return naming_batches(select(rows, source=replayed))


def naming_batches(rows: Rows) -> Rows:
    """Append the batch to the size, if there is more than one batch."""
    if rows["batch"].nunique() < 2:
        return rows
    return rows.assign(size=rows["size"] + rows["batch"].map(", batch {}".format))


BATCHES = ["size", "batch", "context"]
TRAINING: Any = {"rows": BATCHES, "where": STEP}
FIRST_STEP = {
    "first step (ms)": quantity("first_step", "ms"),
    "settled (ms)": quantity("settled_step", "ms"),
    "sd without warm-up (ms)": quantity("sd_cold", "ms"),
    "sd after warm-up (ms)": quantity("sd_warm", "ms"),
}
BF16 = "Speed-up of a bf16 training step over fp32 by context length, {basis}"
TABLES = {
    "front_steps": Table(
        title="Training step in milliseconds by context length",
        rows=["size", "precision"],
        columns={"{context}": time(phase="total")},
        where=MAIN,
    ),
    "front_bf16": Table(
        title=BF16,
        rows=["size"],
        data=lambda rows: at_first(select(speedups(rows), main=True), "basis"),
        columns={"{context}": speedup()},
    ),
    "front_warm_up": Table(
        title="First and settled training step of a fresh process, and standard deviation of its "
        "steps",
        rows=["size"],
        where={**TRAINED, "status": "ok"},
        columns=FIRST_STEP,
    ),
    "steps": Table(
        title="Training step by phase, {precision}",
        **TRAINING,
        columns={
            f"{name}{', device' * (clock == 'device')} (ms)": time(phase=phase, clock=clock)
            for phase, name in STEP_PHASES.items()
            for clock in CLOCKS
        },
    ),
    "inference": Table(
        title="Forward pass without gradients, {precision}",
        rows=BATCHES,
        where={**WARM, "mode": "forward", "phase": "total"},
        columns={
            "wall (ms)": time(),
            "device (ms)": time(clock="device"),
            "TFLOP/s, device": quantity("rate", clock="device"),
            "of stated peak, device": quantity("mfu", "percent", clock="device"),
        },
    ),
    "passes": Table(
        title="Forward and backward without an optimizer, {precision}",
        rows=BATCHES,
        where={**WARM, "mode": "forward_backward"},
        columns={
            **{f"{name} (ms)": time(phase=name) for name in PASSES},
            "both (ms)": time(phase="total"),
            "both, device (ms)": time(phase="total", clock="device"),
            "both, mean (ms)": time(phase="total", field="mean"),
            "both, sd (ms)": time(phase="total", field="sd"),
        },
    ),
    "rates": Table(
        title="Throughput and utilization of a training step, {precision}",
        **TRAINING,
        columns={
            "tokens/s": quantity("throughput", "integer"),
            "TFLOP/s": quantity("rate", clock="wall"),
            "of stated peak": quantity("mfu", "percent", clock="wall"),
            "TFLOP/s, device": quantity("rate", clock="device"),
            "of stated peak, device": quantity("mfu", "percent", clock="device"),
            "of measured matmul, device": quantity("measured_mfu", "percent", clock="device"),
            "device / wall": quantity("busy_share", "percent", phase="total"),
            "peak memory (GiB)": quantity("peak_memory", "GiB"),
        },
    ),
    "layers": Table(
        title="Forward plus backward per layer, and busy share by phase, of a training step, "
        "{precision}",
        **TRAINING,
        columns={
            **{f"{c} (ms per layer)": quantity("per_layer", "ms", clock=c) for c in CLOCKS},
            **{f"{p}, device / wall": quantity("busy_share", "percent", phase=p) for p in PHASES},
        },
    ),
    "graph_checks": Table(
        title="Forward and backward without an optimizer: device time, and the same kernels "
        "replayed as a CUDA graph",
        rows=["size", "context", "precision", "phase"],
        data=graph_checked,
        where={"phase": PASSES},
        columns={
            "device (ms)": time(clock="device"),
            "graph replay (ms)": quantity("graph_replay_time", "ms"),
            "replay / device": quantity("replay_to_device", "times"),
            "busy in the replay / device": quantity("replay_busy_to_device", "times"),
            "kernels": quantity("kernels", "integer"),
            "pause per kernel (µs)": quantity("pause_per_kernel"),
        },
    ),
    "speedups": Table(
        title=BF16, rows=["size", "batch"], data=speedups, columns={"{context}": speedup()}
    ),
    "forward_speedups": Table(
        title="Speed-up of a bf16 forward pass over fp32 by context length, device time",
        rows=["size", "batch"],
        data=lambda rows: select(rows, comparison="bf16_forward"),
        columns={"{context}": speedup()},
    ),
    "first_steps": Table(
        title="What the first step of a fresh process costs",
        rows=["mode", "size"],
        where={"phase": WARM_UP, "status": "ok"},
        columns={
            **FIRST_STEP,
            "first step beyond a settled one (ms)": quantity("first_step_extra", "ms"),
            "settled from step": quantity("settles_at", "integer"),
        },
    ),
    "warm_up": Table(
        title="Cold processes, {mode}: mean of the steps after a number of warm-up steps",
        rows=["size"],
        where={"start": "cold", "phase": "total"},
        columns={"warm-ups: {warmup} (ms)": quantity("time", "ms", field="mean", clock="wall")},
    ),
    "published": Table(
        title="Published for other GPUs (batch 4, eager, mean of steps after 5 warm-ups)",
        chapter="published",
        rows=["gpu", "size", "context", "precision"],
        where={"topic": "end_to_end", "batch": 4, "compile": "no", "warmup": 5},
        columns={
            **{f"{name} (ms)": quantity("published", "ms", phase=name) for name in PASSES},
            "both (ms)": quantity("published", "ms", phase="forward_backward"),
        },
    ),
}

FIGURES = {
    "time_by_context": Figure(
        title="Training step by context length",
        facet="precision",
        color="size",
        x=Axis(field="context", title="context length", log=2),
        y=Axis("ms per step", log=10),
        where={**times("wall", "total"), **MAIN},
    ),
    "per_layer": Figure(
        title="Forward and backward per layer in a bf16 training step: wall and device time",
        facet="clock",
        color="size",
        facet_title="{} time",
        x=Axis(field="context", title="context length", log=2),
        y=Axis("ms per layer"),
        where={"quantity": "per_layer", "precision": "bf16", "main": True},
    ),
    "first_steps": Figure(
        title="First steps of a fresh process",
        facet="mode",
        color="size",
        x=Axis(field="step", title="step"),
        y=Axis("ms per step", log=10),
        data=first_steps,
    ),
}


def facts(chapter: Chapter) -> dict[str, Any]:
    rows = select(chapter.own.rows, status="ok")
    main = select(rows, **MAIN)
    whole = {**times("wall", "total"), **MAIN}
    steps = select(rows, **whole)
    shortest = min(select(main, quantity="per_layer")["context"].dropna(), default=None)
    layers = {"quantity": "per_layer", "precision": "bf16", "context": shortest, **MAIN}
    busy = select(main, quantity="busy_share", phase="total")
    host_bound = select(busy, value=lambda share: share < HOST_BOUND_BELOW)
    mfu = {"quantity": "mfu", "clock": "device" if len(busy) else "wall", **MAIN}
    settled = select(rows, quantity="settles_at", **TRAINED)["value"]
    cold_mean = records(select(rows, quantity="cold_mean", **TRAINED))
    fp32 = chapter.extremes(precision="fp32", **whole)
    slowest = fp32["high"] if fp32 else {"source": None}
    phases = select(rows, source=slowest["source"], **times("wall", PHASES))
    tried = select(chapter.own.rows, **STEP)
    others = {*select(tried, status=lambda status: status != "oom")["size"]}
    weights = select(rows, quantity="parameters", size={*tried["size"]} - others)
    return {
        "steps": {"fp32": fp32},
        "phases": {row["phase"]: row["value"] / slowest["value"] for row in records(phases)},
        "in_bf16": {(r["size"], r["context"]): r for r in records(select(steps, precision="bf16"))},
        "batch": next(iter(main["batch"]), None),
        "too_large": records(weights.drop_duplicates("size")),
        "shortest": next(iter(steps["context"]), None),
        "unsteady": len(select(steps, stability=list(UNSTEADY))),
        **{f"layers_{clock}": chapter.extremes(clock=clock, **layers) for clock in CLOCKS},
        "host_bound": len(host_bound),
        "gpu_bound": len(select(busy, value=lambda share: share >= GPU_BOUND_FROM)),
        "busy_points": len(busy),
        "host_bound_bf16": len(select(host_bound, precision="bf16")),
        "mfu": {p: chapter.extremes(precision=p, **mfu) for p in ("fp32", "bf16")},
        "first_step_extra": chapter.extremes(quantity="first_step_extra", **TRAINED),
        "settles_at": max(settled, default=None),
        "settled_within": SETTLED_WITHIN,
        "cold_mean": cold_mean,
        "unsettled": len(cold_mean) - len(settled),
        "disagreement": disagreement(rows),
        "repeat": agreement(chapter.results, chapter.name),
    }
