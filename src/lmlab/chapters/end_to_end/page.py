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
from lmlab.report.repeat import GPU_BOUND_FROM, agreement
from lmlab.report.table import Table, quantity, time
from lmlab.report.text import UNSTEADY

TITLE = "End to end"

WARM = {"start": "warm"}
STEP = {**WARM, "mode": "train_step"}
MAIN = {**STEP, "main": True}
"""Training steps of the main grid: the study's first batch, sizes of which a step fits."""
MODES = {
    "forward": "forward",
    "forward_backward": "forward and backward",
    "train_step": "training step",
}
POINT = ["size", "context", "batch", "precision"]
CLOCKS = ("wall", "device")
# Below this share of wall time the GPU waits for the host.
HOST_BOUND_BELOW = 0.80
# A step is settled once no later one is more than this above the process's final pace.
SETTLED_WITHIN = 0.10


def derive(rows: Rows, results: Results) -> Rows:
    """Per-layer times, busy share, rates and utilization next to what was measured."""
    rows = _with_main(rows)
    for clock in CLOCKS:
        passes = {p: {**STEP, **times(clock, p)} for p in ("forward", "backward")}
        rows = combine(rows, "both", passes, lambda p: p.forward + p.backward, unit="ms")
        both = {"quantity": "both", "clock": clock}
        rows = derived(rows, "per_layer", both, lambda found: found.value / found.num_layers)
    for phase in ("forward", "backward", "optimizer", "total"):
        clocks = {clock: times(clock, phase) for clock in reversed(CLOCKS)}
        rows = combine(rows, "busy_share", clocks, lambda p: (p.device / p.wall).clip(upper=1))
    rows = _with_bottleneck(rows)
    parts = {"total": times("wall", "total"), "tokens": {"quantity": "tokens"}}
    rows = combine(rows, "throughput", parts, lambda p: p.tokens / p.total * 1e3)
    return _utilization(_graph_checks(rows), results)


def _with_main(rows: Rows) -> Rows:
    """A column `main`, whether a row belongs to the grid that the front page shows."""
    sizes = [size for (size,) in distinct(select(rows, status="ok", **STEP), ["size"])]
    return rows.assign(main=rows["size"].isin(sizes) & (rows["batch"] == rows["batch"].iloc[0]))


def _with_bottleneck(rows: Rows) -> Rows:
    """A column `bottleneck`: host or GPU by the busy share of the point's training step, a dash
    where that is unknown."""
    shares = select(rows, quantity="busy_share", phase="total", **STEP)
    by_point = {tuple(row[key] for key in POINT): row["value"] for _, row in shares.iterrows()}
    found = [by_point.get(point) for point in rows[POINT].itertuples(index=False, name=None)]
    names = ["-" if s is None else "host" if s < HOST_BOUND_BELOW else "GPU" for s in found]
    return rows.assign(bottleneck=names)


def _graph_checks(rows: Rows) -> Rows:
    """Device time against the replay of a CUDA graph: replay over device time, busy time of a
    replay over device time, and microseconds of pause per kernel of a replay."""
    for phase in ("forward", "backward"):
        parts = {
            "replay": {"quantity": "graph_replay_time", "phase": phase},
            "busy": {"quantity": "graph_busy_time", "phase": phase},
            "kernels": {"quantity": "kernels", "phase": phase},
            "device": times("device", phase),
        }
        rows = combine(rows, "replay_to_device", parts, lambda p: p.replay / p.device)
        rows = combine(rows, "replay_busy_to_device", parts, lambda p: p.busy / p.device)
        rows = combine(
            rows, "pause_per_kernel", parts, lambda p: (p.replay - p.busy) / p.kernels * 1e3
        )
    return rows


def times(clock: str, phase: str) -> dict[str, str]:
    """The condition for one phase's time."""
    return {"quantity": "time", "clock": clock, "phase": phase}


def _utilization(rows: Rows, results: Results) -> Rows:
    """Matmul FLOPs of a step over its time by either clock, and as shares of the stated and the
    measured peak."""
    flops = (
        select(rows, quantity="flops", kind="matmul").groupby("source", sort=False)["value"].sum()
    )
    rows = derived(
        rows,
        "rate",
        {**times("wall", "total"), "clock": list(CLOCKS), "source": list(flops.index)},
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


COLD = {"start": "cold", "phase": "total", "clock": "wall", "status": "ok", "quantity": "time"}


def first_steps(results: Results) -> Rows:
    """Every step of a cold process in order: the process without warm-up, as in the table."""
    rows = select(results.rows, warmup=0, **COLD)
    found = []
    for row in rows.to_dict("records"):
        same = {"size": row["size"], "mode": MODES[row["mode"]]}
        found += [{**same, "step": i, "value": ms} for i, ms in enumerate(row["samples"], 1)]
    return pd.DataFrame(found)


def warm_up(rows: Rows) -> Rows:
    """Per mode and size: what the first step costs beyond a settled one, and when the process
    settles."""
    cold = select(rows, **COLD)
    found = []
    for size, mode in distinct(cold, ["size", "mode"]):
        mine = select(cold, size=size, mode=mode, warmup=0)
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
            sd = select(cold, size=size, mode=mode, warmup=warmup)["sd"]
            numbers[f"sd_{warmup}"] = None if sd.empty else sd.iloc[0]
        found += [
            {**first, "mode": MODES[mode], "quantity": name, "value": value, "clock": None}
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
        on=["size", "context", "batch"],
        where={"quantity": "time", "clock": clock},
        replicates=REPLICATES,
        replicate_keys=[*POINT, "phase"],
        pool=["bottleneck"],
    )


COMPARISONS = {
    "bf16": precision_comparison("bf16", "wall", **STEP, phase="total"),
    "bf16_device": precision_comparison("bf16", "device", **STEP, phase="total"),
    "bf16_optimizer": precision_comparison("bf16", "wall", **STEP, phase="optimizer"),
}


def speedups(rows: Rows) -> Rows:
    """bf16 over fp32 as rows: by device time and by wall clock."""
    parts = [
        COMPARISONS[name].run(rows).rows().assign(basis=basis)
        for name, basis in (("bf16_device", "device time"), ("bf16", "wall time"))
    ]
    return pd.concat([part for part in parts if not part.empty] or [rows.head(0)])


def front_speedups(rows: Rows) -> Rows:
    """By device time, which repeats from machine to machine; by wall clock on a CPU."""
    found = select(speedups(rows), main=True)
    return found if found.empty else select(found, basis=found["basis"].iloc[0])


def graph_checked(rows: Rows) -> Rows:
    """The points that were also replayed as a CUDA graph."""
    return select(rows, source=list(select(rows, quantity="graph_replay_time")["source"]))


STEP_PHASES = {
    "forward": "forward",
    "backward": "backward",
    "optimizer": "optimizer",
    "total": "step",
}

TABLES = {
    "front_steps": Table(
        title="Training step in milliseconds by context length",
        rows=["size", "precision"],
        across="context",
        columns={"{context}": time(phase="total")},
        where=MAIN,
    ),
    "front_layers": Table(
        title="Forward and backward pass of a bf16 training step at the shortest context, "
        "milliseconds per layer",
        rows=["size", "num_layers"],
        headers={"num_layers": "layers"},
        columns={
            "wall": quantity("per_layer", "ms", clock="wall"),
            "device": quantity("per_layer", "ms", clock="device"),
        },
        where={"precision": "bf16", "main": True},
        data=lambda rows: select(rows, context=_shortest(rows)),
    ),
    "front_bf16": Table(
        title="Speed-up of a bf16 training step over fp32 by context length, {basis}",
        facet="basis",
        rows=["size"],
        across="context",
        data=front_speedups,
        columns={"{context}": quantity("speedup", "text", field="speedup")},
    ),
    "front_warm_up": Table(
        title="Cold processes: first and settled training step, and standard deviation over ten "
        "steps without and with five warm-up steps",
        rows=["size"],
        data=warm_up,
        where={"mode": MODES["train_step"]},
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
        rows=["size", "batch", "context"],
        where=STEP,
        columns={
            f"{name}{', device' * (clock == 'device')} (ms)": time(phase=phase, clock=clock)
            for phase, name in STEP_PHASES.items()
            for clock in CLOCKS
        },
    ),
    "modes": Table(
        title="Forward pass alone, and forward and backward without an optimizer, {precision}",
        facet="precision",
        rows=["size", "batch", "context"],
        where=WARM,
        columns={
            "inference forward (ms)": time(mode="forward", phase="total"),
            "device (ms)": time(mode="forward", phase="total", clock="device"),
            "forward (ms)": time(mode="forward_backward", phase="forward"),
            "backward (ms)": time(mode="forward_backward", phase="backward"),
            "both (ms)": time(mode="forward_backward", phase="total"),
            "both, device (ms)": time(mode="forward_backward", phase="total", clock="device"),
            "mean": time(mode="forward_backward", phase="total", field="mean"),
            "sd": time(mode="forward_backward", phase="total", field="sd"),
        },
    ),
    "rates": Table(
        title="Throughput and utilization of a training step, {precision}",
        facet="precision",
        rows=["size", "batch", "context"],
        where=STEP,
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
        title="Forward and backward per layer within a training step, {precision}",
        facet="precision",
        rows=["size", "batch", "context"],
        where=STEP,
        columns={
            "wall (ms per layer)": quantity("per_layer", "ms", clock="wall"),
            "device (ms per layer)": quantity("per_layer", "ms", clock="device"),
            "forward, device / wall": quantity("busy_share", "percent", phase="forward"),
            "backward, device / wall": quantity("busy_share", "percent", phase="backward"),
            "optimizer, device / wall": quantity("busy_share", "percent", phase="optimizer"),
        },
    ),
    "graph_checks": Table(
        title="Forward and backward without an optimizer: device time, and the same kernels "
        "replayed as a CUDA graph",
        rows=["size", "context", "precision", "phase"],
        data=graph_checked,
        where={"phase": ["forward", "backward"]},
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
        title="Speed-up of a bf16 training step over fp32, {basis}",
        facet="basis",
        rows=["size", "batch"],
        across="context",
        data=speedups,
        columns={"{context}": quantity("speedup", "text", field="speedup")},
    ),
    "first_steps": Table(
        title="What the first step of a fresh process costs",
        rows=["mode", "size"],
        data=warm_up,
        columns={
            "first step (ms)": quantity("first_step", "ms"),
            "settled (ms)": quantity("settled_step", "ms"),
            "first step beyond a settled one (ms)": quantity("first_step_extra", "ms"),
            "settled from step": quantity("settles_at", "integer"),
        },
    ),
    "warm_up": Table(
        title="Cold processes, {mode}: mean of ten steps after so many warm-up steps",
        facet="mode",
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
            **MAIN,
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
        where={"quantity": "per_layer", "precision": "bf16", "main": True},
    ),
    "first_steps": Figure(
        title="First steps of a fresh process",
        mark="line",
        facet="mode",
        color="size",
        x=Axis(field="step", title="step"),
        y=value_axis("ms per step", log=10),
        data=first_steps,
    ),
}


def facts(chapter: Chapter) -> dict[str, Any]:
    """What the sentences of the page need."""
    rows = select(chapter.own.rows, status="ok")
    main = select(rows, **MAIN)
    steps = select(main, **times("wall", "total"))
    layers = select(main, quantity="per_layer", precision="bf16", context=_shortest(main))
    busy = select(main, quantity="busy_share", phase="total")
    warm = warm_up(rows)
    trained = select(warm, mode=MODES["train_step"])
    clock = "device" if len(busy) else "wall"
    return {
        "steps": {
            p: extremes(select(steps, precision=p)) for (p,) in distinct(steps, ["precision"])
        },
        "contexts": [context for (context,) in distinct(steps, ["context"])],
        "unsteady": len(select(steps, stability=list(UNSTEADY))),
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
            p: extremes(select(main, quantity="mfu", precision=p, clock=clock))
            for p in ("fp32", "bf16")
        },
        "graph": extremes(select(rows, quantity="replay_to_device")),
        "pauses": _range(select(rows, quantity="pause_per_kernel")),
        "first_step_extra": _range(select(trained, quantity="first_step_extra")),
        "settles_at": sorted(set(select(trained, quantity="settles_at")["value"])),
        "cold_mean": _ends(select(trained, quantity="cold_mean")),
        "unsettled": len(distinct(trained, ["size"])) - len(select(trained, quantity="settles_at")),
        "disagreement": {
            clock: _quantiles(select(repeatability(rows), clock=clock)["value"]) for clock in CLOCKS
        },
        "repeat": agreement(chapter.results, chapter.name),
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
