"""Collectives as tidy frames: one row a case, with its bandwidths, and a line through its sizes.

Bandwidths follow nccl-tests. Algorithm bandwidth is size over time, what a caller sees. Bus
bandwidth is what each rank's connection carries: of n ranks an all-reduce sends 2 (n - 1) / n of
its size, an all-gather or a reduce-scatter (n - 1) / n, a broadcast all of it; only that can be
held against hardware, or against another number of ranks. One rank sends nothing and has neither.

Times over sizes are a latency and a bandwidth, t = alpha + size / beta. The line is fitted to
relative errors, since a size of 1 GiB would otherwise leave nothing to say to one of 1 MiB; where
that gives a negative latency, since large sizes take longer a byte, it is taken as zero.

What ran where is what the process group said of itself, never what was asked for. A case without a
time was either refused by its backend or cut: not begun, since its job's time was up.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import pandas as pd

from lmlab.writeup.collect import Row
from lmlab.writeup.comparison import FEWEST_SAMPLES
from lmlab.writeup.numbers import binary_bytes, counted, exact, listed

MIB = 2**20
FEWEST_SIZES = 3
"""A line through two points has no error to show."""
NOISY_MEANS = "the middle half of the samples spans more than 10 % of the median"
BACKENDS = {"nccl": "NCCL", "gloo": "gloo"}
FIRST = "all_reduce"
OPERATIONS = {
    "all_reduce": "All-reduce",
    "all_gather": "All-gather",
    "reduce_scatter": "Reduce-scatter",
    "broadcast": "Broadcast",
}
KIND = ["arm", "operation", "dtype"]
TIMES = ["median_ms", "q1_ms", "q3_ms", "min_ms", "max_ms"]
COLUMNS = [
    "arm", "backend", "device", "gpus", "world_size", "placement", "operation", "dtype",
    "size_bytes", "time_cap_s", "reason", "cut", "n", "noisy", *TIMES, "rank_median_ms",
    "algorithm_gb_per_s", "bus_gb_per_s",
]  # fmt: skip
FIT_COLUMNS = [
    *KIND, "world_size", "sizes", "latency_ms", "seconds_per_byte", "bus_gb_per_s", "worst_error",
]  # fmt: skip


def frame(rows: Iterable[Row]) -> pd.DataFrame:
    """All cases of the points that were measured."""
    data = pd.DataFrame([record for row in rows for record in _records(row)], columns=COLUMNS)
    # Also of no case at all, that they can be asked which cases they hold for.
    return data.astype({"cut": bool, "noisy": bool})


def measured(data: pd.DataFrame) -> pd.DataFrame:
    """Cases that carry a time."""
    return data[data["median_ms"].notna()]


def between_ranks(data: pd.DataFrame) -> pd.DataFrame:
    """Cases in which something is sent."""
    return data[data["world_size"] > 1]


def has_few_samples(data: Any) -> Any:
    """Whether a case, or each of several, rests on too few samples to show how far they scatter."""
    return data["n"] < FEWEST_SAMPLES


def samples(counts: Iterable[float]) -> str:
    """`n = 3`, `n = 3 to 50`."""
    ends = sorted({int(count) for count in counts})
    return f"n = {ends[0]}" if len(ends) == 1 else f"n = {ends[0]} to {ends[-1]}"


def time_caps(data: pd.DataFrame) -> str:
    """The time that the jobs had: `16 s`."""
    return f"{listed(exact(cap) for cap in sorted(set(data['time_cap_s'])))} s"


def halves(data: pd.DataFrame) -> tuple[list[int], list[int]]:
    """The smaller and the larger half of all sizes, so that no result chooses where to cut them."""
    sizes = sorted({nominal_mib(size) for size in data["size_bytes"]})
    return sizes[: len(sizes) // 2], sizes[len(sizes) // 2 :]


def of(data: pd.DataFrame, **wanted: Any) -> pd.DataFrame:
    """Rows with these values."""
    for column, value in wanted.items():
        data = data[data[column] == value]
    return data


def order(data: pd.DataFrame, column: str) -> list[Any]:
    """A column's values in order of appearance."""
    return list(dict.fromkeys(data[column]))


def asked_for(size_bytes: float) -> str:
    """The size that the study asked for, as the page prints it."""
    return binary_bytes(nominal_mib(size_bytes) * MIB)


def nominal_mib(size_bytes: float) -> int:
    """The size that was asked for: six ranks share a few bytes less."""
    return round(size_bytes / MIB)


def arm_of(group: Any) -> str:
    """What took part, in words: `2 ranks on one GPU over gloo`."""
    backend = BACKENDS.get(group["backend"], str(group["backend"]))
    ranks, gpus = int(group["world_size"]), int(group["gpus"])
    if group["device"] == "cpu":
        where = counted(ranks, "CPU rank")
    elif gpus == ranks:
        where = counted(ranks, "GPU")
    else:
        where = f"{counted(ranks, 'rank')} on {'one GPU' if gpus == 1 else counted(gpus, 'GPU')}"
    nodes = int(group["nnodes"])
    return f"{where}{f' of {nodes} nodes' if nodes > 1 else ''} over {backend}"


def bus_factor(operation: str, ranks: int) -> float:
    """What a rank's connection carries of the size; none where there is nobody to send to."""
    if ranks < 2:
        return math.nan
    return {"all_reduce": 2 * (ranks - 1) / ranks, "broadcast": 1.0}.get(
        operation, (ranks - 1) / ranks
    )


def _records(row: Row) -> list[dict[str, Any]]:
    if row.result is None or row.result.status != "ok":
        return []
    group = row.result.data["ranks"]
    shared = {
        "arm": arm_of(group),
        **{key: group[key] for key in ("backend", "device", "gpus", "world_size")},
        "placement": row.point.parameters["placement"],
        "time_cap_s": row.result.settings["time_cap_s"],
    }
    return [{**shared, **_case(case, group["world_size"])} for case in row.result.data["cases"]]


def _case(case: Any, ranks: int) -> dict[str, Any]:
    kept = {key: case[key] for key in ("operation", "dtype", "size_bytes")}
    if "samples_ms" not in case:
        reason = str(case["reason"])
        return {**kept, "reason": reason, "cut": _is_out_of_time(reason), "noisy": False}
    algorithm = case["size_bytes"] / case["median_ms"] / 1e6 if ranks > 1 else math.nan
    return {
        **kept,
        "cut": False,
        **{key: case[key] for key in ("n", "noisy", *TIMES, "rank_median_ms")},
        "algorithm_gb_per_s": algorithm,
        "bus_gb_per_s": algorithm * bus_factor(case["operation"], ranks),
    }


def _is_out_of_time(reason: str) -> bool:
    """Whether the words are the experiment's own; all others are a backend's."""
    return reason.endswith(("were left", "time was up"))


def fits(data: pd.DataFrame) -> pd.DataFrame:
    """Latency and bandwidth of every arm, operation and format with enough sizes."""
    records = []
    for key, part in measured(data).groupby(KIND, sort=False):
        if len(part) < FEWEST_SIZES:
            continue
        ranks = int(part["world_size"].iloc[0])
        latency, per_byte, worst = fit_line(part["size_bytes"], part["median_ms"] / 1e3)
        records.append(
            {
                **dict(zip(KIND, key, strict=True)),
                "world_size": ranks,
                "sizes": len(part),
                "latency_ms": 1e3 * latency,
                "seconds_per_byte": per_byte,
                "bus_gb_per_s": bus_factor(str(part["operation"].iloc[0]), ranks) / per_byte / 1e9,
                "worst_error": worst,
            }
        )
    return pd.DataFrame(records, columns=FIT_COLUMNS)


def fit_line(sizes: Iterable[float], seconds: Iterable[float]) -> tuple[float, float, float]:
    """Latency, seconds a byte, and the largest relative error of the line."""
    size, time = np.array(list(sizes), dtype=float), np.array(list(seconds), dtype=float)
    terms = np.stack([1 / time, size / time], axis=1)
    latency, per_byte = np.linalg.lstsq(terms, np.ones_like(time), rcond=None)[0]
    if latency < 0:
        share = size / time
        latency, per_byte = 0.0, share.sum() / (share**2).sum()
    worst = np.abs((latency + per_byte * size) / time - 1).max()
    return float(latency), float(per_byte), float(worst)
