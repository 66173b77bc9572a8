"""Tables over the kernels frame: which kernel, which family, which range took how much time.

The kernel table is the one that `nsys stats --report cuda_gpu_kern_sum` prints, to the digit:
grouped by whole name, the largest total first, the deviation that of a sample (0 for one instance),
numbers rounded to one decimal with halves away from zero. nsys leaves copies and sets out of it, so
pass it `without_copies`; every function counts exactly the rows that it is given.

Kernels on different streams overlap, so totals are work and not elapsed time; see `gpu_time`.
"""

from __future__ import annotations

from collections.abc import Iterable
from decimal import ROUND_HALF_UP, Decimal

import pandas as pd

from lmlab.measure.trace.families import MATMULS, family

SUMMARY_COLUMNS = (
    *("time_percent", "total_ns", "instances", "avg_ns", "med_ns", "min_ns", "max_ns", "sd_ns"),
    *("name", "short_name", "family"),
)
PRINTED = {
    "time_percent": "Time (%)",
    "total_ns": "Total Time (ns)",
    "instances": "Instances",
    "avg_ns": "Avg (ns)",
    "med_ns": "Med (ns)",
    "min_ns": "Min (ns)",
    "max_ns": "Max (ns)",
    "sd_ns": "StdDev (ns)",
    "name": "Name",
}
_WITH_A_DECIMAL = ("time_percent", "avg_ns", "med_ns", "sd_ns")


def without_copies(kernels: pd.DataFrame) -> pd.DataFrame:
    """The rows that compute: no copies and sets of the copy engines."""
    return kernels[~kernels["kind"].isin(("memcpy", "memset"))]


def without_matmuls(kernels: pd.DataFrame) -> pd.DataFrame:
    """The rows that are no matrix product."""
    return kernels[~kernels["family"].isin(MATMULS)]


def within(kernels: pd.DataFrame, name: str) -> pd.DataFrame:
    """The rows (of kernels or of host) whose launch stands in a range of that name."""
    return kernels[[name in path for path in kernels["ranges"]]]


def kernel_summary(kernels: pd.DataFrame) -> pd.DataFrame:
    """One row a kernel name, most total time first; families are those of the name alone."""
    durations = kernels.groupby("name", observed=True, sort=False)["duration_ns"]
    table = pd.DataFrame(
        {
            "total_ns": durations.sum(),
            "instances": durations.size(),
            "avg_ns": durations.mean(),
            "med_ns": durations.median(),
            "min_ns": durations.min(),
            "max_ns": durations.max(),
            "sd_ns": durations.std(ddof=1).fillna(0.0),
        }
    )
    table["time_percent"] = 100.0 * table["total_ns"] / max(int(table["total_ns"].sum()), 1)
    shortened = kernels.groupby("name", observed=True, sort=False)["short_name"].first()
    table["short_name"] = shortened.astype(str)
    table = table.reset_index()
    table["name"] = table["name"].astype(str)
    table["family"] = table["name"].map(family)
    # Equal totals are put in order of name, so that the table is the same every time.
    table = table.sort_values(["total_ns", "name"], ascending=[False, True], ignore_index=True)
    return table[list(SUMMARY_COLUMNS)]


def as_nsys_prints(summary: pd.DataFrame) -> pd.DataFrame:
    """The kernel table with nsys's headings, its numbers as text in nsys's rounding."""
    table = summary[list(PRINTED)].copy()
    for column in PRINTED:
        decimal = column in _WITH_A_DECIMAL
        table[column] = [one_decimal(v) if decimal else str(v) for v in summary[column]]
    return table.rename(columns=PRINTED)


def one_decimal(value: float) -> str:
    """A number rounded to one decimal, halves away from zero (Python rounds them to even)."""
    return str(Decimal(repr(float(value))).quantize(Decimal("0.1"), rounding=ROUND_HALF_UP))


def top_kernel(kernels: pd.DataFrame) -> pd.Series | None:
    """The summary's first row, the kernel with the most time in all; None without kernels."""
    summary = kernel_summary(kernels)
    return None if summary.empty else summary.iloc[0]


def family_totals(kernels: pd.DataFrame) -> pd.DataFrame:
    """By family, those that occur in the order of FAMILIES: total_ns, instances, share of all."""
    table = kernels.groupby("family", observed=True)["duration_ns"].agg(
        total_ns="sum", instances="size"
    )
    table["share"] = table["total_ns"] / max(int(table["total_ns"].sum()), 1)
    return table.reset_index()


def range_totals(kernels: pd.DataFrame, names: Iterable[str] | None = None) -> pd.DataFrame:
    """By range: kernels launched in it and their total_ns; all ranges, or these in this order.

    A kernel counts in every range that its launch stands in, once in each.
    """
    wanted = None if names is None else list(names)
    found: dict[str, list[int]] = {name: [0, 0] for name in wanted or ()}
    by_path = kernels.groupby("ranges", sort=False)["duration_ns"].agg(["size", "sum"])
    for path, count, total in by_path.itertuples(name=None):
        for name in set(path) if wanted is None else set(path).intersection(wanted):
            entry = found.setdefault(name, [0, 0])
            entry[0] += count
            entry[1] += total
    rows = [(name, count, total) for name, (count, total) in found.items()]
    if wanted is None:
        rows.sort(key=lambda row: (-row[2], row[0]))
    return pd.DataFrame(rows, columns=["range", "kernels", "total_ns"])
