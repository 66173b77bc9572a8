"""Collectives: times and bus bandwidth by size, and a latency and a bandwidth fitted to them.

Bandwidths follow nccl-tests. Algorithm bandwidth is size over time. Bus bandwidth is what the
connection of each rank carries, the only number that can be compared with hardware or between
different numbers of ranks: of n ranks an all-reduce sends 2 (n - 1) / n of its size, an all-gather
or a reduce-scatter (n - 1) / n, a broadcast all of it. A single rank sends nothing.

Time over size is fitted as latency + size / bandwidth, by relative errors (otherwise 1 GiB would
dominate) and with both parts non-negative.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from scipy.optimize import nnls

from lmlab.chapters.rank_page import measured, not_started, with_ranks
from lmlab.report.compare import Compare
from lmlab.report.figure import Axis, Figure, value_axis
from lmlab.report.frame import Results, Rows, distinct, select
from lmlab.report.frame import derive as derived
from lmlab.report.page import Chapter
from lmlab.report.table import Table, quantity, time

TITLE = "Collectives"

MIB = 2**20
FIRST = "all_reduce"
MIN_SIZES = 3
"""A line through two points has no error to show."""
FRONT_MIB = (1, 10, 100, 1024)
SMALL_MIB = 16
"""Up to here times are dominated by latency, and noise."""


def derive(rows: Rows, results: Results) -> Rows:
    """Sizes as asked for, algorithm and bus bandwidth, and the fitted lines."""
    rows = with_ranks(rows, results, ["operation", "dtype", "bytes"])
    # Sizes are rounded down to a multiple of the world size: 1 MiB is a few bytes less on 6 ranks.
    known = pd.to_numeric(rows["bytes"])
    rows = rows.assign(
        mib=(known / MIB).round(),
        size=known.map(size_name).astype(object),
        collective=rows["operation"].map(lambda n: str(n).replace("_", "-"), na_action="ignore"),
    )
    sent = {"quantity": "time", "world_size": lambda count: count > 1}
    rows = derived(rows, "algbw", sent, lambda f: f.bytes / f.value / 1e6, unit="GB/s")
    rows = derived(rows, "busbw", {"quantity": "algbw"}, _bus, unit="GB/s")
    return _fits(rows)


def size_name(count: float) -> str | None:
    """Bytes as the study asked for them: 16 MiB, 1 GiB."""
    if not count > 0:
        return None
    mib = round(count / MIB)
    return f"{mib // 1024} GiB" if mib % 1024 == 0 else f"{mib} MiB"


def bus_factor(operation: str, ranks: int) -> float:
    """Share of a tensor's size that each rank's connection carries."""
    share = (ranks - 1) / ranks
    return {"all_reduce": 2 * share, "broadcast": 1.0}.get(operation, share)


def _bus(found: Rows) -> list[float]:
    return [
        value * bus_factor(operation, ranks)
        for value, operation, ranks in zip(
            found.value, found.operation, found.world_size, strict=True
        )
    ]


def fit_line(sizes: Any, ms: Any) -> tuple[float, float, float]:
    """Latency in ms, bytes per ms, and the largest relative error of the line."""
    size, time = np.asarray(sizes, float), np.asarray(ms, float)
    terms = np.stack([1 / time, size / time], axis=1)
    (latency, per_byte), _ = nnls(terms, np.ones_like(time))
    worst = np.abs(terms @ [latency, per_byte] - 1).max()
    return float(latency), float(1 / per_byte) if per_byte else np.inf, float(worst)


def _fits(rows: Rows) -> Rows:
    """Latency, bus bandwidth and error of the line per point, operation and dtype."""
    found: list[dict[str, Any]] = []
    times = select(rows, quantity="time", status="ok", world_size=lambda count: count > 1)
    for _, group in times.groupby(["source", "operation", "dtype"], sort=False):
        if len(group) < MIN_SIZES:
            continue
        first: Any = group.iloc[0].to_dict()
        latency, per_ms, worst = fit_line(group["bytes"], group["value"])
        carried = bus_factor(first["operation"], first["world_size"]) * per_ms / 1e6
        numbers = [("latency", latency, "ms"), ("bandwidth", carried, "GB/s")]
        numbers += [("fit_error", worst, ""), ("bytes_per_ms", per_ms, "B")]
        found += [
            {**first, "quantity": name, "value": value, "unit": unit, "clock": None, "n": None}
            | {"bytes": None, "mib": None, "size": None, "noisy": None, "samples": None}
            for name, value, unit in numbers
        ]
    return pd.concat([rows, pd.DataFrame(found, columns=rows.columns, dtype=object)])


def fit_figure(results: Results) -> Rows:
    """The fitted line of each group at every size, then what was measured."""
    rows = select(results.rows, operation=FIRST, dtype=_first_dtype(results.rows), status="ok")
    times = select(rows, quantity="time", world_size=lambda count: count > 1)
    parts = []
    for (ranks,) in distinct(times, ["ranks"]):
        mine = select(times, ranks=ranks)
        line = {
            name: select(rows, ranks=ranks, quantity=name)["value"]
            for name in ("latency", "bytes_per_ms")
        }
        if not line["latency"].empty:
            fitted = line["latency"].iloc[0] + mine["bytes"] / line["bytes_per_ms"].iloc[0]
            parts.append(mine.assign(value=fitted, kind="fit"))
        parts.append(mine.assign(kind="measured"))
    return pd.concat(parts) if parts else times


def _first_dtype(rows: Rows) -> Any:
    dtypes = distinct(rows, ["dtype"])
    return dtypes[0][0] if dtypes else None


def _fp32(rows: Rows) -> Rows:
    """Points that ran, in the first dtype of the study; bf16 stays in the results."""
    return select(measured(rows), dtype=_first_dtype(rows))


def _between(rows: Rows) -> Rows:
    return select(_fp32(rows), world_size=lambda count: count > 1)


def _front(rows: Rows) -> Rows:
    """Some sizes, where a study has many."""
    few = select(_between(rows), mib=FRONT_MIB)
    return few if len(distinct(few, ["size"])) == len(FRONT_MIB) else _between(rows)


TABLES = {
    "front": Table(
        title="All-reduce in milliseconds, slowest rank",
        rows=["size"],
        across="ranks",
        data=_front,
        where={"operation": FIRST},
        columns={"{ranks}": time()},
    ),
    "times": Table(
        title="{collective}: milliseconds, slowest rank",
        facet="collective",
        rows=["size"],
        across="ranks",
        data=_fp32,
        columns={"{ranks}": time()},
    ),
    "bandwidths": Table(
        title="{collective}: bus bandwidth in GB/s",
        facet="collective",
        rows=["size"],
        across="ranks",
        data=_between,
        columns={"{ranks}": quantity("busbw")},
    ),
    "fits": Table(
        title="Latency and bus bandwidth fitted to all sizes; error: the size that the line misses "
        "most",
        rows=["ranks", "collective"],
        headers={"collective": "operation"},
        data=_between,
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
        mark="line",
        color="ranks",
        dash="kind",
        points="measured",
        x=Axis(field="mib", title="MiB", log=2),
        y=value_axis("ms, slowest rank", log=10),
        data=fit_figure,
    ),
}

COMPARISONS = {
    "bf16": Compare(
        variant={"dtype": "bf16"},
        baseline={"dtype": "fp32"},
        on=["operation", "ranks", "mib"],
        where={"quantity": "time", "world_size": lambda count: count > 1},
    ),
}


def facts(chapter: Chapter) -> dict[str, Any]:
    """Groups with their fits and largest message; what was noisy; what could not start."""
    rows = chapter.own.rows
    times = select(_between(rows), quantity="time", operation=FIRST, status="ok")
    small = select(times, mib=lambda size: size <= SMALL_MIB)
    alone = select(_fp32(rows), quantity="time", world_size=1, status="ok")
    groups = [_group(rows, times, ranks) for (ranks,) in distinct(times, ["ranks"])]
    order = {"own_gpu": 0, "shared_gpu": 1, "cpu": 2}
    groups.sort(key=lambda group: (order[group["placement"]], group["world_size"]))
    return {
        "groups": groups,
        "dtype": _first_dtype(rows),
        "not_started": not_started(rows),
        "noisy": int(small["noisy"].eq(True).sum()),
        "small": len(small),
        "alone": (alone["value"].min(), alone["value"].max()) if len(alone) else None,
        "cpu": [group for group in groups if group["placement"] == "cpu"],
    }


def _group(rows: Rows, times: Rows, ranks: str) -> dict[str, Any]:
    """One process group: its fit of an all-reduce, and its largest message."""
    mine = select(times, ranks=ranks)
    largest = mine.sort_values("mib", key=pd.to_numeric).iloc[-1]
    fit = select(_between(rows), ranks=ranks, operation=FIRST)
    values = {
        name: select(fit, quantity=name)["value"] for name in ("latency", "bandwidth", "fit_error")
    }
    return {
        "ranks": ranks,
        "placement": largest["placement"],
        "world_size": largest["world_size"],
        "size": largest["size"],
        "ms": largest["value"],
        **{name: None if found.empty else found.iloc[0] for name, found in values.items()},
    }
