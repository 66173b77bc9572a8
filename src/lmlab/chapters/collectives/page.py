"""Collectives: time and bus bandwidth by size, with a fitted latency and bandwidth.

Bandwidths follow nccl-tests. Algorithm bandwidth is size over time. Bus bandwidth is what the link
of each rank carries, the only number that can be compared with hardware limits or across world
sizes: on n ranks an all-reduce sends 2 (n - 1) / n of its size, an all-gather or reduce-scatter
(n - 1) / n, and a broadcast all of it. A single rank sends nothing.

Time is fitted as latency + size / bandwidth, minimizing relative errors (otherwise 1 GiB would
dominate), with both terms non-negative.
"""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pandas as pd
from scipy.optimize import nnls

from lmlab.chapters.rank_page import PLACEMENTS, first_value, measured, not_started, with_ranks
from lmlab.report.compare import Compare
from lmlab.report.figure import Axis, Figure
from lmlab.report.frame import Results, Rows, at_first, computed, derived, distinct, select
from lmlab.report.page import Chapter
from lmlab.report.table import Column, Table, quantity, time
from lmlab.report.text import MIB, UNSTEADY

TITLE = "Collectives"

MULTI_RANK: dict[str, Any] = {"world_size": lambda count: count > 1}
SENT = {"quantity": "time", **MULTI_RANK}
FIT_OPERATION = "all_reduce"
MIN_SIZES = 3
"""A line through two points has no error to show."""
MAX_ERROR = 0.3
"""Times further from the line than this, or that rise by less in all, do not follow it."""
FRONT_MIB = (1, 10, 100, 1024)
SMALL_MIB = 16
"""Up to here times are dominated by latency, and noise."""


def derive(rows: Rows, results: Results) -> Rows:
    """Add nominal sizes, algorithm and bus bandwidth, and the fitted lines."""
    rows = with_ranks(rows, results, ["operation", "dtype", "bytes"])
    # Sizes are rounded down to a multiple of the world size: 1 MiB is a few bytes less on 6 ranks.
    known = pd.to_numeric(rows["bytes"])
    rows = rows.assign(
        mib=(known / MIB).round(),
        size=known.map(size_name).astype(object),
        on_bus=[*map(bus_factor, rows["operation"], rows["world_size"])],
        collective=rows["operation"].map(lambda n: str(n).replace("_", "-"), na_action="ignore"),
    )
    rows = derived(rows, "algbw", SENT, lambda f: f.bytes / f.value / 1e6)
    rows = derived(rows, "busbw", {"quantity": "algbw"}, lambda f: f.value * f.on_bus)
    return pd.concat([rows, *_fits(rows)])


def size_name(count: float) -> str | None:
    """The nominal size: 16 MiB, 1 GiB."""
    if not count > 0:
        return None
    mib = round(count / MIB)
    return f"{mib // 1024} GiB" if mib % 1024 == 0 else f"{mib} MiB"


def bus_factor(operation: str, ranks: int) -> float:
    """Bus bandwidth over algorithm bandwidth."""
    share = (ranks - 1) / ranks
    return {"all_reduce": 2 * share, "broadcast": 1.0}.get(operation, share)


def fit_line(sizes: Any, ms: Any) -> tuple[float, float, float]:
    """Latency in ms, bytes per ms, and the largest relative error of the line."""
    size, time = np.asarray(sizes, float), np.asarray(ms, float)
    terms = np.stack([1 / time, size / time], axis=1)
    (latency, per_byte), _ = nnls(terms, np.ones_like(time))
    worst = np.abs(terms @ [latency, per_byte] - 1).max()
    return float(latency), float(1 / per_byte) if per_byte else np.inf, float(worst)


def _fits(rows: Rows) -> Iterator[Rows]:
    """Latency, bus bandwidth and fit error per point, operation and dtype."""
    times = select(rows, status="ok", **SENT)
    for _, group in times.groupby(["source", "operation", "dtype"], sort=False):
        if len(group) < MIN_SIZES:
            continue
        latency, per_ms, worst = fit_line(group["bytes"], group["value"])
        first: Any = group.iloc[0].to_dict()
        numbers = {"fit_error": worst}
        if worst <= MAX_ERROR and group["bytes"].max() > MAX_ERROR * latency * per_ms:
            numbers |= {"latency": latency, "bytes_per_ms": per_ms}
            numbers["bandwidth"] = first["on_bus"] * per_ms / 1e6
        yield computed(first, numbers, **dict.fromkeys(["unit", "bytes", "mib", "size"]))


def fit_figure(results: Results) -> Rows:
    """Per group, the fitted line over the range of measured sizes, and the measured points."""
    rows = select(_multi_rank(results.rows), operation=FIT_OPERATION, status="ok")
    times = select(rows, quantity="time")
    parts = [times.head(0)]
    for ranks, mine in times.groupby("ranks", sort=False):
        latency = first_value(rows, ranks=ranks, quantity="latency")
        per_ms = first_value(rows, ranks=ranks, quantity="bytes_per_ms")
        if latency is not None:
            sizes = np.geomspace(mine["bytes"].min(), mine["bytes"].max(), 50)
            line = mine.iloc[[0] * len(sizes)].assign(mib=sizes / MIB, kind="fit")
            parts.append(line.assign(value=latency + sizes / per_ms))
        parts.append(mine.assign(kind="measured"))
    return pd.concat(parts)


def _in_first_dtype(rows: Rows) -> Rows:
    """Rows of points that ran, in the study's first dtype: tables show no other."""
    return at_first(measured(rows), "dtype")


def _multi_rank(rows: Rows) -> Rows:
    return select(_in_first_dtype(rows), **MULTI_RANK)


def _front(rows: Rows) -> Rows:
    """All-reduces of a few sizes, if the study has these, else of all sizes."""
    all_reduce = select(_multi_rank(rows), operation=FIT_OPERATION)
    few = select(all_reduce, mib=FRONT_MIB)
    return few if len(distinct(few, ["size"])) == len(FRONT_MIB) else all_reduce


def _by_size(title: str, data: Callable[[Rows], Rows], column: Column) -> Table:
    return Table(title=title, rows=["size"], data=data, columns={"{ranks}": column})


TABLES = {
    "front": _by_size("All-reduce in milliseconds, slowest rank", _front, time()),
    "times": _by_size("{collective}: milliseconds, slowest rank", _in_first_dtype, time()),
    "bandwidths": _by_size("{collective}: bus bandwidth in GB/s", _multi_rank, quantity("busbw")),
    "fits": Table(
        title="Latency and bus bandwidth fitted to all sizes; error: the largest relative "
        "distance from the line",
        rows=["ranks", "collective"],
        headers={"collective": "operation"},
        data=_multi_rank,
        columns={
            "latency (ms)": quantity("latency"),
            "bus bandwidth (GB/s)": quantity("bandwidth"),
            "error": quantity("fit_error", "percent"),
        },
    ),
}

FIGURES = {
    "fit": Figure(
        title="All-reduce: measured (points) and latency + size / bandwidth (lines)",
        color="ranks",
        dash="kind",
        points="measured",
        x=Axis(field="mib", title="MiB", log=2),
        y=Axis("ms, slowest rank", log=10),
        data=fit_figure,
    )
}

SAME_WORK = ["operation", "ranks", "mib"]
COMPARISONS = {
    "bf16": Compare(variant={"dtype": "bf16"}, baseline={"dtype": "fp32"}, on=SAME_WORK, where=SENT)
}


def facts(chapter: Chapter) -> dict[str, Any]:
    """Groups with their fits and largest message, noisy times, and groups that could not start."""
    rows = chapter.own.rows
    times = select(_multi_rank(rows), quantity="time", operation=FIT_OPERATION, status="ok")
    small = select(times, mib=lambda size: size <= SMALL_MIB)
    alone = select(_in_first_dtype(rows), quantity="time", world_size=1, status="ok")
    groups = [_group(rows, mine) for _, mine in times.groupby("ranks", sort=False)]
    groups.sort(key=lambda each: (list(PLACEMENTS).index(each["placement"]), each["world_size"]))
    return {
        "groups": groups,
        "dtype": next(iter(_in_first_dtype(rows)["dtype"]), None),
        "max_error": MAX_ERROR,
        "small_mib": SMALL_MIB,
        "not_started": not_started(rows),
        "noisy": int((small["noisy"].eq(True) | small["stability"].isin(UNSTEADY)).sum()),
        "small": len(small),
        "alone": (alone["value"].min(), alone["value"].max()) if len(alone) else None,
    }


def _group(rows: Rows, times: Rows) -> dict[str, Any]:
    """One process group: its all-reduce fit and its largest all-reduce."""
    largest = times.sort_values("mib", key=pd.to_numeric).iloc[-1]
    mine = select(_multi_rank(rows), ranks=largest["ranks"])
    fit = select(mine, operation=FIT_OPERATION)
    return {
        **{name: largest[name] for name in ("ranks", "placement", "world_size", "size")},
        "ms": largest["value"],
        "busbw": first_value(fit, quantity="busbw", mib=largest["mib"]),
        "gather_ms": first_value(mine, quantity="time", operation="all_gather", mib=largest["mib"]),
        **{name: first_value(fit, quantity=name) for name in ("latency", "bandwidth")},
    }
