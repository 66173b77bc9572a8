"""What the pages about jobs of several ranks share: who took part, and what needs more GPUs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pandas as pd

from lmlab.report.compare import Compare, Comparison
from lmlab.report.figure import Axis, Figure
from lmlab.report.frame import Results, Rows, distinct, select

BACKENDS = {"nccl": "NCCL", "gloo": "gloo"}
PLACEMENTS = {"own_gpu": "{} GPUs", "shared_gpu": "{} ranks on one GPU", "cpu": "{} CPU ranks"}


def with_ranks(rows: Rows, results: Results, labels: Sequence[str]) -> Rows:
    """The rows with a column `ranks`, which names the process group of a point: "2 CPU ranks
    over gloo". Backend and device are what the group itself reported, not what was asked for.
    The columns of `labels` exist even if nothing was measured."""
    reported = {
        source: describe(result.data["ranks"])
        for source, result in results.results.items()
        if "ranks" in result.data
    }
    asked = [
        reported.get(source) or PLACEMENTS[placement].format(world_size)
        for source, placement, world_size in rows[["source", "placement", "world_size"]].itertuples(
            index=False, name=None
        )
    ]
    missing = [label for label in labels if label not in rows]
    return rows.assign(ranks=asked, **dict.fromkeys(missing))


def describe(group: Mapping[str, Any]) -> str:
    """A short description of a process group."""
    count, gpus = group["world_size"], group["gpus"]
    if group["device"] == "cpu":
        who = f"{count} CPU rank" + "s" * (count > 1)
    elif gpus == count:
        who = f"{count} GPU" + "s" * (count > 1)
    else:
        who = f"{count} ranks on {'one GPU' if gpus == 1 else f'{gpus} GPUs'}"
    nodes = f" on {group['nnodes']} nodes" if group["nnodes"] > 1 else ""
    return f"{who}{nodes} over {BACKENDS.get(group['backend'], group['backend'])}"


def measured(rows: Rows) -> Rows:
    """Rows of the points that ran: a group that could not start gets no column."""
    return rows[rows["quantity"].notna()]


def not_started(rows: Rows) -> list[dict[str, Any]]:
    """Groups that this machine could not start, with the reason; one entry per point."""
    found = select(rows[rows["quantity"].isna()], status=["unsupported", "failed", "oom"])
    keys = ["ranks", "placement", "world_size", "status", "reason"]
    return [dict(zip(keys, values, strict=True)) for values in distinct(found, keys)]


def lead(rows: Rows) -> str | None:
    """The group shown on the front page: one GPU per rank first, then fewest ranks."""
    order = list(PLACEMENTS)
    found = distinct(select(measured(rows), status="ok"), ["placement", "world_size", "ranks"])
    return min(found, key=lambda key: (order.index(key[0]), key[1]))[2] if found else None


def of_lead(rows: Rows) -> Rows:
    """The rows of that group."""
    return select(rows, ranks=lead(rows))


def against(rows: Rows, baseline: str, phase: str = "total") -> Comparison:
    """Every variant against one of them, in the same rounds of the same job."""
    times = select(rows, quantity="time", phase=phase)
    pairs = [
        pair
        for (variant,) in distinct(times, ["variant"])
        if variant != baseline
        for pair in Compare(
            variant={"variant": variant}, baseline={"variant": baseline}, on=["ranks"]
        )
        .run(times)
        .pairs
    ]
    return Comparison(pairs)


def sizes(rows: Rows) -> dict[str, dict[str, Any]]:
    """By purpose: the size that the group shown on the front page ran, and why no larger one."""
    found = select(of_lead(rows), quantity="size")
    return {
        purpose: {
            "size": select(found, purpose=purpose, status="ok")["value"].iloc[0],
            "left_out": [
                {"size": row["candidate"], "reason": row["reason"]}
                for row in select(found, purpose=purpose, status="unsupported").to_dict("records")
            ],
        }
        for (purpose,) in distinct(found, ["purpose"])
    }


def timeline(results: Results, variants: Sequence[str], names: Mapping[str, str]) -> Rows:
    """A profiled step of the group on the front page: a panel per variant, a lane per activity."""
    ours = lead(results.rows)
    rows = [
        {"panel": names.get(variant, variant), "activity": activity, "start": start, "end": end}
        for result in results.results.values()
        if "intervals_ms" in result.data and describe(result.data["ranks"]) == ours
        if result.chapter == results.rows["chapter"].iloc[0]
        for variant in variants
        for activity, intervals in result.data["intervals_ms"].get(variant, {}).items()
        for start, end in intervals
    ]
    return pd.DataFrame(rows)


def overlap_timeline(data: Callable[[Results], Rows]) -> Figure:
    """One profiled step: when rank 0 computes, communicates and copies, one panel per variant."""
    return Figure(
        title="One step of rank 0 under the profiler",
        mark="timeline",
        facet="panel",
        color="activity",
        x=Axis(field="start", title="ms"),
        x2="end",
        y=Axis(field="activity", title="", categorical=True),
        data=data,
        share_x=True,  # the lengths of the steps are there to be compared
        height=2.6,
    )
