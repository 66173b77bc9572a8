"""How well results repeat: the times that two sets of the same study have in common.

The sets are joined on parameters, labels and clock; settings need not agree. Device times (profiler
or CUDA events), GPU-bound wall times (GPU busy for nearly all of it) and other wall times repeat
very differently, so they are counted separately.
"""

from itertools import chain
from typing import Any

import pandas as pd

from lmlab.report.frame import Results, Rows, select
from lmlab.report.text import plain

WITHIN = 0.03
# A wall time is GPU-bound if the device time is at least this share of it.
GPU_BOUND_FROM = 0.95
DEVICE, GPU_BOUND, OTHER = "device time", "wall time, GPU-bound", "wall time, other"
KIND_OF_CLOCK = {"device": DEVICE, "events": DEVICE, "wall": OTHER}


def agreement(results: Results, chapter: str) -> list[dict[str, Any]]:
    """Per kind of time: number of pairs, how many agree within 3 %, the median and the worst
    difference; empty without a second set."""
    if results.repeat is None:
        return []
    both = [*results.of(chapter), *results.repeat.of(chapter)]
    labels = (record["labels"] for result in both for record in result.measurements)
    names = list(dict.fromkeys(chain(*(result.parameters for result in both), *labels)))
    found = pairs(results, results.repeat, chapter, names)
    varying = [name for name in names if found[name].nunique(dropna=False) > 1]
    kinds = {kind: select(found, kind_of_time=kind) for kind in (DEVICE, GPU_BOUND, OTHER)}
    return [{"kind": kind, **_counted(rows, varying)} for kind, rows in kinds.items() if len(rows)]


def pairs(one: Results, other: Results, chapter: str, names: list[str]) -> Rows:
    """One row per time of a chapter that both sets have: its parameters, labels and clock, `first`,
    `second`, their relative `difference`, and `kind_of_time`, for which a wall time is compared
    with the device time of the same work in the first set."""
    times = {"chapter": chapter, "status": "ok", "quantity": "time", "clock": list(KIND_OF_CLOCK)}
    # A label missing from one set is a column of NaN, which merges with text only as object.
    types: dict[str, type] = {**dict.fromkeys(names, object), "clock": object, "value": float}
    left, right = (
        select(each.rows, **times).reindex(columns=[*types]).astype(types) for each in (one, other)
    )
    found = left.merge(right, on=[*names, "clock"])
    found = found.rename(columns={"value_x": "first", "value_y": "second"})
    ratio = found["first"] / found["second"]
    found["difference"] = ratio.where(ratio > 1, 1 / ratio) - 1
    # Both can be 0: the device time of a phase without kernels.
    found = found.dropna(subset=["difference"], ignore_index=True)
    # A pass that makes up its whole step is recorded as both, with the same samples.
    same = [*(name for name in names if name != "phase"), "clock", "first", "second"]
    found = found.drop_duplicates(same, ignore_index=True)
    device = select(found, clock="device")[[*names, "first"]]
    busy = found.merge(device, on=names, how="left", suffixes=("", "_busy"))["first_busy"]
    gpu_bound = (found["clock"] == "wall") & (busy / found["first"] >= GPU_BOUND_FROM)
    return found.assign(kind_of_time=found["clock"].map(KIND_OF_CLOCK).mask(gpu_bound, GPU_BOUND))


def _counted(rows: Rows, varying: list[str]) -> dict[str, Any]:
    worst = rows.sort_values("difference").iloc[-1]
    return {
        **{"count": len(rows), "within": int((rows["difference"] <= WITHIN).sum())},
        **{"median": float(rows["difference"].median()), "worst": worst["difference"]},
        **{"first": worst["first"], "second": worst["second"]},
        "where": ", ".join(f"{n} {plain(worst[n])}" for n in varying if pd.notna(worst[n])),
    }
