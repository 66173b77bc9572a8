"""Activation checkpointing: peak memory and step time of each strategy."""

from collections.abc import Iterator
from typing import Any

from lmlab.report.compare import Compare, Comparison, Pair
from lmlab.report.frame import Rows, computed, highest, records, select
from lmlab.report.table import Table, memory, quantity, time
from lmlab.report.text import times

CHECKPOINTING = {"topic": "checkpointing"}
BEST_PREDICTED = "best predicted"
FRONT_SEGMENTS = 2
# A peak with more than this share of all gradients live is late in backward.
LATE_IN_BACKWARD = 0.5


def relative_times(rows: Rows) -> Iterator[Rows]:
    """Step time of each strategy relative to its baseline, by both clocks."""
    for pair in slowdowns(rows):
        numbers = {"relative_time": 1 / pair.ratio}
        yield computed(pair.variant, numbers, clock=pair.variant["clock"], shown=shown(pair))


def front_strategies(rows: Rows) -> Rows:
    """One point for the front page: the `every-K` with the lowest peaks, none, and nested."""
    rows = select(rows, source=checkpointed_points(rows)[:1])
    every = select(rows, quantity="peak_memory", kind="every", status="ok")
    lowest = every.sort_values("value", kind="stable").head(FRONT_SEGMENTS)
    return select(rows, variant=["none", "nested", *lowest["variant"]])


def checkpointed_points(rows: Rows) -> list[str]:
    """Points with timed strategies: first those that also fit without checkpointing, longest step
    (the least host-bound) first, then the rest."""
    times = select(rows, quantity="time", clock="wall", status="ok", **CHECKPOINTING)
    plain = select(times, variant="none").sort_values("value", ascending=False)
    return list(dict.fromkeys([*plain["source"], *times["source"]]))


def slowdowns(rows: Rows) -> Comparison:
    """Compare each strategy's step with its point's baseline, in paired rounds of one job, first by
    wall and then by device time. The baseline is no checkpointing or, where that does not fit,
    `every-1`."""
    on = ["source", "clock"]
    steps = select(rows, status="ok", quantity="time", clock=["wall", "device"], **CHECKPOINTING)
    steps = steps.sort_values("clock", ascending=False, kind="stable")
    order = steps["variant"].map({"none": 0, "every-1": 1}).fillna(2).sort_values(kind="stable")
    steps = steps.assign(first=steps.index.isin(steps.loc[order.index].drop_duplicates(on).index))
    return Compare(variant={}, baseline={"first": True}, on=on, by=["variant"], where={}).run(steps)


def shown(slowdown: Pair) -> str:
    """The slowdown, or the verdict if it is not decided."""
    if slowdown.variant["variant"] == slowdown.baseline["variant"]:
        return times(1.0)
    ends = " to ".join(times(1 / end) for end in reversed(slowdown.ends))
    return ends if slowdown.decided else slowdown.verdict


STRATEGY_COLUMNS = {
    "peak (GiB)": memory(),
    "step (ms)": time(),
    "device (ms)": time(clock="device"),
    "device, relative": quantity("relative_time", "text", "shown", clock="device"),
}
BY_POINT: Any = {"rows": ["variant"], "headers": {"variant": "strategy"}}
TABLES = {
    "front_strategies": Table(
        title="Training step of {point}; nested: halves within halves",
        data=front_strategies,
        columns=STRATEGY_COLUMNS,
        **BY_POINT,
    ),
    "strategies": Table(
        title="Training step of {point}",
        where={**CHECKPOINTING, "variant": lambda name: name != BEST_PREDICTED},
        columns={
            **STRATEGY_COLUMNS,
            "step, relative": quantity("relative_time", "text", "shown", clock="wall"),
            "saved by forward (GiB)": memory("saved_for_backward"),
            "predicted peak (GiB)": memory("predicted_peak"),
            "error": quantity("prediction_error", "percent"),
        },
        **BY_POINT,
    ),
}


def facts(rows: Rows) -> list[dict[str, Any]]:
    return [_strategies(select(rows, source=source)) for source in checkpointed_points(rows)]


def _strategies(rows: Rows) -> dict[str, Any]:
    """Facts of one point: its lowest peak, peaks without checkpointing and nested, slowdowns."""
    peaks = select(rows, quantity="peak_memory", status="ok", kind=["every", "nested"])
    every = select(peaks, kind="every")
    best = highest(every if len(every) else peaks, key=lambda peak: -peak)
    live = records(select(rows, quantity="predicted_live", kind="every"))
    parts = {r["category"]: r["value"] for r in live if best and r["variant"] == best["variant"]}
    return {
        "point": records(rows)[0],
        "best": best,
        "none": _first(rows, quantity="peak_memory", variant="none"),
        "predicted_none": _first(rows, quantity="predicted_peak", variant="none"),
        "predicted_best": _first(rows, quantity="predicted_peak", variant=BEST_PREDICTED),
        "nested": _first(rows, quantity="peak_memory", variant="nested", status="ok"),
        "late": parts.get("gradients", 0) > LATE_IN_BACKWARD * parts.get("parameters", 1)
        and parts["activations"] > 0,
        # By device time, where there is any.
        "slowdowns": {pair.variant["variant"]: pair for pair in slowdowns(rows)},
    }


def _first(rows: Rows, **where: Any) -> dict[str, Any] | None:
    return next(iter(records(select(rows, **where))), None)
