"""How well results repeat: the values that two sets of the same study have in common.

Two sets are joined on what identifies a value: the point's parameters, the record's labels, its
quantity and its clock; settings need not agree. A value is a device time (profiler or CUDA events),
a wall time where the GPU was busy for nearly all of it, or another wall time; these three repeat
very differently, so they are counted separately.
"""

from __future__ import annotations

from typing import Any

import pandas as pd

from lmlab.report.frame import Results, Rows, select

WITHIN = 0.03
# From this share of wall time on, the GPU is the bottleneck.
GPU_BOUND_FROM = 0.95
DEVICE, GPU_BOUND, OTHER = "device time", "wall time, GPU-bound", "wall time, other"
KIND_OF_CLOCK = {"device": DEVICE, "events": DEVICE, "wall": OTHER}


def pairs(one: Results, other: Results, chapter: str, **where: Any) -> Rows:
    """One row per value of a chapter that both sets have: what identifies it, `first`, `second`
    and their relative `difference`."""
    on = [*identity(one, other, chapter), "quantity", "clock"]
    left, right = (
        select(each.rows, chapter=chapter, status="ok", **where).reindex(columns=[*on, "value"])
        for each in (one, other)
    )
    found = left.merge(right, on=on).rename(columns={"value_x": "first", "value_y": "second"})
    found = found.astype({"first": float, "second": float})
    ratio = found["first"] / found["second"]
    found["difference"] = ratio.where(ratio > 1, 1 / ratio) - 1
    # Where both are 0 (the device time of a phase without kernels), nothing could differ.
    return found.dropna(subset=["difference"], ignore_index=True)


def identity(one: Results, other: Results, chapter: str) -> list[str]:
    """The names of a chapter's parameters and labels."""
    results = [*one.of(chapter), *other.of(chapter)]
    names = [name for result in results for name in result.parameters]
    names += [name for result in results for rec in result.measurements for name in rec["labels"]]
    return list(dict.fromkeys(names))


def agreement(results: Results, chapter: str) -> list[dict[str, Any]]:
    """Per kind of time: how many values the two sets share, how many agree, and the worst one;
    empty without a second set."""
    if results.repeat is None:
        return []
    times = {"quantity": "time", "clock": list(KIND_OF_CLOCK)}
    found = pairs(results, results.repeat, chapter, **times)
    telling = [
        name
        for name in identity(results, results.repeat, chapter)
        if found[name].nunique(dropna=False) > 1
    ]
    found["kind"] = _kinds(found)
    kinds = {kind: select(found, kind=kind) for kind in (DEVICE, GPU_BOUND, OTHER)}
    return [{"kind": kind, **_counted(rows, telling)} for kind, rows in kinds.items() if len(rows)]


def _kinds(found: Rows) -> pd.Series[Any]:
    """The kind of each time; a wall time is GPU-bound by the device time of the same thing."""
    same = [name for name in found if name not in ("clock", "first", "second", "difference")]
    device = select(found, clock="device")[[*same, "first"]]
    busy = found.merge(device, on=same, how="left", suffixes=("", "_busy"))["first_busy"]
    gpu_bound = (found["clock"] == "wall") & (busy / found["first"] >= GPU_BOUND_FROM)
    return found["clock"].map(KIND_OF_CLOCK).mask(gpu_bound, GPU_BOUND)


def _counted(rows: Rows, telling: list[str]) -> dict[str, Any]:
    worst = rows.sort_values("difference").iloc[-1]
    return {
        "count": len(rows),
        "within": int((rows["difference"] <= WITHIN).sum()),
        "median": float(rows["difference"].median()),
        "worst": worst["difference"],
        "first": worst["first"],
        "second": worst["second"],
        "where": ", ".join(str(worst[name]) for name in telling if pd.notna(worst[name])),
    }
