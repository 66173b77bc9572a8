"""The fastest step: the ladder, what each rung gains, our kernels next to the library's."""

from __future__ import annotations

from functools import partial
from typing import Any

import pandas as pd

from lmlab.report.compare import Compare
from lmlab.report.figure import Axis, Figure, value_axis
from lmlab.report.frame import Results, Rows, combine, distinct, extremes, select
from lmlab.report.frame import derive as derived
from lmlab.report.page import Chapter
from lmlab.report.table import Table, memory, quantity, time

TITLE = "The fastest step"

ORDER = [
    *("fp32", "tf32", "bf16", "attention", "adamw", "loss", "compile", "masters", "graph"),
    *("batch", "checkpoint"),
]
STEP = ["source", "rung", "attention"]
OWN: dict[str, Any] = {"own": True}
RUNG = {"side": ["rung", "other"]}


def _rungs(baseline: str, topic: str, *on: str) -> Compare:
    """A rung against another side of its rounds, per token."""
    where = {"quantity": "token_time", "topic": topic}
    return Compare(variant={"side": "rung"}, baseline={"side": baseline}, on=on, where=where)


def _kernels(baseline: str) -> Compare:
    """Our kernel against another one."""
    where = {"quantity": "time", "topic": "kernels"}
    ours, other = {"variant": "ours"}, {"variant": baseline}
    return Compare(variant=ours, baseline=other, on=["size", "part"], where=where)


COMPARISONS = {
    "rungs": _rungs("before", "ladder", "size", "rung"),
    "attention": _rungs("other", "ladder", "size", "rung"),
    "leaderboard": _rungs("before", "leaderboard", "rung"),
    "kernels": _kernels("library"),
    "loss": _kernels("compiled"),
}
COLUMNS = ["rung", "attention", "side", "variant", "part", "topic", "size", "layers", "precision"]


def derive(rows: Rows, results: Results) -> Rows:
    """Rates and utilization, speed-ups as rows, and which records are the ladder's own."""
    rows = rows.reindex(columns=[*rows.columns, *(c for c in COLUMNS if c not in rows)])
    rows = rows.assign(own=(rows["variant"] == rows["rung"]) | (rows["side"] == "rung"))
    times: dict[str, Any] = {"quantity": "time", **RUNG}
    for name, part, unit, factor in (
        ("throughput", "tokens", "1/s", 1e3),
        ("rate", "flops", "TFLOP/s", 1e-9),
    ):
        parts = {"time": times, "part": {"quantity": part}}
        rows = combine(rows, name, parts, partial(_per_time, factor), unit=unit, on=STEP)
    rows = _utilization(rows, results)
    rows = derived(rows, "relative", {"quantity": "throughput", **OWN}, _over_first)
    for name in ("rungs", "attention", "leaderboard"):
        found = COMPARISONS[name].run(rows)
        if found:
            gains = found.rows().assign(quantity=f"gain_{name}")
            rows = pd.concat([rows, gains], ignore_index=True)
    return rows


def _per_time(factor: float, parts: Rows) -> Any:
    return factor * parts.part / parts.time


def _over_first(found: Rows) -> Any:
    first = found.groupby("source", sort=False)["value"].transform("first")
    return found["value"] / first


def _share_of(peaks: dict[str, float], found: Rows) -> Any:
    return found.value / found.precision.map(peaks)


def _utilization(rows: Rows, results: Results) -> Rows:
    """The rate as shares of the stated peak and of the best matmul measured."""
    for name, peak in (("mfu", "stated_matmul_rate"), ("measured_mfu", "matmul_rate")):
        peaks = select(results.rows, chapter="machine", quantity=peak, status="ok")
        rates = dict(zip(peaks["dtype"], peaks["value"], strict=True)) if len(peaks) else {}
        known = {"quantity": "rate", "precision": list(rates)}
        rows = derived(rows, name, known, partial(_share_of, rates))
    return rows


LADDER_COLUMNS = {
    "batch": quantity("tokens", "integer", field="batch_size", **OWN),
    "step (ms)": time(side="rung"),
    "tokens/s": quantity("throughput", "integer", **OWN),
    "over the rung before": quantity("gain_rungs", "text", field="speedup"),
    "MFU, stated peak": quantity("mfu", "percent", **OWN),
    "MFU, measured": quantity("measured_mfu", "percent", **OWN),
    "peak (GiB)": memory(**OWN),
    "mJ/token": quantity("energy_per_token", "mJ", **OWN),
    "to compile (s)": quantity("compile_time", "s", **OWN),
    "gradient error": quantity("gradient_error", "scientific", **OWN),
    "allowed": quantity("gradient_tolerance", "scientific", **OWN),
}
TABLES = {
    "front": Table(
        title="Rungs of the ladder; MFU against the stated peak",
        rows=["rung"],
        across="size",
        where={"topic": "ladder", "rung": lambda rung: rung != "checkpoint"},
        columns={
            "{size}, step (ms)": time(side="rung"),
            "{size}, MFU": quantity("mfu", "percent", **OWN),
        },
    ),
    "ladder": Table(
        title="The ladder, {size}: each rung adds to the one before",
        facet="size",
        rows=["rung"],
        where={"topic": "ladder"},
        columns=LADDER_COLUMNS,
    ),
    "attention": Table(
        title="The same rung with another attention, in the same rounds",
        rows=["size", "rung"],
        where={"topic": "ladder"},
        data=partial(select, status="ok"),
        columns={
            "ours (ms)": time(side="rung", attention=lambda name: name != "naive"),
            "other (ms)": time(side="other"),
            "other": time("text", side="other", field="attention"),
            "ours is": quantity("gain_attention", "text", field="speedup"),
        },
    ),
    "tries": Table(
        title="Batches tried, {size}: tokens per second",
        facet="size",
        rows=["rung", "checkpoint", "batch_size"],
        where={"quantity": "tried_throughput"},
        columns={"tokens/s": quantity("tried_throughput", "integer")},
    ),
    "kernels": Table(
        title="Our kernels next to the library's",
        rows=["size", "part", "variant"],
        where={"topic": "kernels"},
        columns={
            "time (ms)": time(clock=["events", "wall"]),
            "peak (MiB)": quantity("peak_memory", "MiB"),
            "error": quantity("error", "scientific"),
        },
    ),
    "leaderboard": Table(
        title="The leaderboard's step with few layers",
        rows=["rung"],
        where={"topic": "leaderboard"},
        columns={
            "step (ms)": time(side="rung"),
            "over the rung before": quantity("gain_leaderboard", "text", field="speedup"),
            "peak (GiB)": memory(**OWN),
            "to compile (s)": quantity("compile_time", "s", **OWN),
        },
    ),
    "layers": Table(
        title="Layers tried at the leaderboard's shape",
        rows=["layers"],
        where={"topic": "leaderboard", "variant": "deepest"},
        columns={"step (ms)": quantity("time", "ms"), "peak (GiB)": memory()},
    ),
}


def in_order(results: Results) -> Rows:
    """Gains over the first rung, sizes that left out a rung included."""
    found = select(results.rows, status="ok", quantity="relative", topic="ladder")
    return found.sort_values("rung", key=lambda rungs: rungs.map(ORDER.index), kind="stable")


FIGURES = {
    "ladder": Figure(
        title="The ladder: tokens per second, over the first rung",
        mark="line",
        color="size",
        x=Axis(field="rung", title="rung, each on top of the one before", categorical=True),
        y=value_axis("times the first rung", log=10),
        data=in_order,
    )
}


def facts(chapter: Chapter) -> dict[str, Any]:
    """The best step of each size, rungs where another attention wins, and the leaderboard."""
    rows = chapter.own.rows
    return {
        "best": [_best(rows, size) for (size,) in _sizes(rows)],
        "left_out": _left_out(rows),
        "layers": chapter.value(quantity="layers"),
        "layer_ms": chapter.value(quantity="layer_time"),
        "leaderboard": next(iter(chapter.results.of("fastest_step")[-1:]), None),
        "leaderboard_rate": chapter.value(quantity="throughput", topic="leaderboard", rung=pd.isna),
    }


def _sizes(rows: Rows) -> list[tuple[Any, ...]]:
    return distinct(select(rows, quantity="throughput", topic="ladder", **OWN), ["size"])


def _best(rows: Rows, size: str) -> dict[str, Any]:
    """The fastest rung of a size with its numbers, and the first rung."""
    mine = select(rows, size=size, topic="ladder", status="ok", **OWN)
    rates = select(mine, quantity="throughput")
    found = extremes(rates)
    assert found is not None, "only sizes with a rung are asked for"
    best = found["high"]
    here = select(mine, rung=best["rung"])
    numbers = {
        name: next(iter(select(here, quantity=name)["value"]), None)
        for name in ("mfu", "measured_mfu", "time", "peak_memory", "energy_per_token")
    }
    first = rates.iloc[0]
    return {**best, **numbers, "first": first["rung"], "gain": best["value"] / first["value"]}


def _left_out(rows: Rows) -> dict[str, list[str]]:
    """Rungs that do not run here, by reason."""
    reasons: dict[str, list[str]] = {}
    failed = select(rows, topic="ladder", status="unsupported", quantity="time", **OWN)
    for row in failed.to_dict("records"):
        reasons.setdefault(str(row["reason"]), []).append(row["rung"])
    return {reason: list(dict.fromkeys(rungs)) for reason, rungs in reasons.items()}
