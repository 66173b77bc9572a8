"""Tables over the kernels frame: which kernel and which family took how much time.

The kernel summary has the numbers of `nsys stats --report cuda_gpu_kern_sum`: grouped by full name,
largest total first, sample standard deviation (0 for one instance). nsys excludes copies and
memsets, so pass `without_copies`; every function counts exactly the rows that it is given.

Kernels on different streams overlap, so totals are work and not elapsed time; see `gpu_time`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from lmlab.measure.trace.families import family

SUMMARY_COLUMNS = (
    *("time_percent", "total_ns", "instances", "avg_ns", "med_ns", "min_ns", "max_ns", "sd_ns"),
    *("name", "short_name", "family"),
)


def without_copies(kernels: pd.DataFrame) -> pd.DataFrame:
    """The rows that compute: without copies and memsets."""
    return kernels[~kernels["kind"].isin(("memcpy", "memset"))]


def within(rows: pd.DataFrame, name: str) -> pd.DataFrame:
    """The kernels or host calls that were launched inside a range of that name."""
    return rows[np.array([name in path for path in rows["ranges"]], dtype=bool)]


def kernel_summary(kernels: pd.DataFrame) -> pd.DataFrame:
    """One row per kernel name, largest total first; the family is that of the name alone."""
    table = (
        kernels.astype({"name": object, "short_name": object})
        .groupby(["name", "short_name"], sort=False)["duration_ns"]
        .agg(
            total_ns="sum",
            instances="size",
            avg_ns="mean",
            med_ns="median",
            min_ns="min",
            max_ns="max",
            sd_ns="std",
        )
        .reset_index()
    )
    table["sd_ns"] = table["sd_ns"].fillna(0.0)
    table["time_percent"] = 100.0 * table["total_ns"] / max(int(table["total_ns"].sum()), 1)
    table["family"] = table["name"].map(family)
    # Ties in order of name, so that the table is the same every time.
    table = table.sort_values(["total_ns", "name"], ascending=[False, True], ignore_index=True)
    return table[list(SUMMARY_COLUMNS)]


def family_totals(kernels: pd.DataFrame) -> pd.DataFrame:
    """total_ns and instances of each family that occurs, in the order of FAMILIES."""
    durations = kernels.groupby("family", observed=True)["duration_ns"]
    return pd.DataFrame({"total_ns": durations.sum(), "instances": durations.size()})


def records(rows: pd.DataFrame) -> list[dict[str, Any]]:
    """Rows as dictionaries of plain values, ready for JSON."""
    return [
        {str(column): value for column, value in row.items()}
        for row in rows.astype(object).to_dict("records")
    ]
