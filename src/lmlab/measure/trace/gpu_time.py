"""Elapsed time on the device: when it was busy, when it was idle, and what it waited for.

Kernels overlap on several streams, so a device's busy time is the union of their intervals. A
phase's *span* runs from the start of its first kernel to the end of its last; the part of the span
that is not busy is idle time. The device nearly always waits for the host: a gap before a kernel
that was launched only after the device had run dry is the host's fault (`host_late`). The idle
share of a phase is an upper bound for how host-bound it is, because a profiler slows the host and
not the kernels.

The span starts with the first kernel and not with the range on the host, because the device may
still be busy with the previous phase. On a CPU the same formulas give the share of time in which
Python and dispatch ran and no operator did its work.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from lmlab.measure.trace.frames import Integers, Trace

_MIN_FOR_MEDIAN = 3


def busy_ns(kernels: pd.DataFrame) -> int:
    """Nanoseconds in which anything ran, summed over devices."""
    return span_ns(kernels) - int(launch_gaps(kernels)["gap_ns"].sum())


def span_ns(kernels: pd.DataFrame) -> int:
    """From the first start to the last end, summed over devices."""
    return sum(int(_ends(rows).max() - rows["start_ns"].min()) for rows in _by_device(kernels))


def launch_gaps(kernels: pd.DataFrame) -> pd.DataFrame:
    """Per row: gap_ns the device was idle before it, and host_late if it was not yet launched.

    The index is that of `kernels`. Gaps are those between the given rows: pass all kernels of a
    device, or those of one phase.
    """
    gaps = pd.DataFrame({"gap_ns": 0, "host_late": False}, index=kernels.index)
    for rows in _by_device(kernels):
        earlier = np.maximum.accumulate(_ends(rows))[:-1]
        idle = rows["start_ns"].to_numpy()[1:] - earlier
        late = rows["launch_ns"].iloc[1:].gt(pd.Series(earlier, rows.index[1:])).fillna(False)
        gaps.loc[rows.index[1:], "gap_ns"] = np.maximum(idle, 0)
        gaps.loc[rows.index[1:], "host_late"] = (idle > 0) & late.to_numpy(dtype=bool)
    return gaps


def waits(trace: Trace) -> pd.DataFrame:
    """Synchronizing calls, longest first; `after` is the range that closed last before each."""
    calls = trace.host[trace.host["kind"] == "synchronize"].copy()
    calls["after"] = pd.Series(None, index=calls.index, dtype=object)
    for process, rows in calls.groupby("process"):
        ranges = trace.ranges[trace.ranges["process"] == process]
        calls.loc[rows.index, "after"] = _closed_last(ranges, rows["start_ns"].to_numpy())
    return calls.sort_values("duration_ns", ascending=False, kind="stable", ignore_index=True)


def slow_ranges(
    trace: Trace, factor: float = 5.0, min_ns: int = 100_000, most: int = 20
) -> pd.DataFrame:
    """Ranges that took more than `factor` times the median of their name, longest first.

    `kernel` is the short name of the kernel launched in it with the largest total time, `call` the
    API call with the largest; None if there was none. Ranges shorter than `min_ns` are ignored.
    """
    by_name = trace.ranges.groupby("name", observed=True)["duration_ns"]
    ranges = trace.ranges.assign(
        median_ns=by_name.transform("median"), instances=by_name.transform("size")
    )
    slow = ranges["duration_ns"] > factor * ranges["median_ns"]
    slow &= (ranges["instances"] >= _MIN_FOR_MEDIAN) & (ranges["duration_ns"] >= min_ns)
    table = ranges[slow].nlargest(most, "duration_ns").reset_index(drop=True)
    rows = list(zip(table["process"], table["start_ns"], _ends(table), strict=True))
    kernels = [_most_time(trace.kernels, "launch_ns", "short_name", *row) for row in rows]
    calls = [_most_time(trace.host, "start_ns", "name", *row) for row in rows]
    return table.assign(
        kernel=pd.Series(kernels, dtype=object), call=pd.Series(calls, dtype=object)
    )


def _most_time(
    frame: pd.DataFrame, moment: str, name: str, process: int, start: int, end: int
) -> str | None:
    """The name with the largest total among the rows whose time is in [start, end)."""
    inside = (frame[moment] >= start) & (frame[moment] < end) & (frame["process"] == process)
    rows = frame[inside.fillna(False).astype(bool)]
    totals = rows.groupby(name, observed=True)["duration_ns"].sum()
    return None if totals.empty else str(totals.idxmax())


def _closed_last(ranges: pd.DataFrame, moments: Integers) -> list[str | None]:
    """Name of the range that closed last before each moment; on a tie, the outermost."""
    ends, durations = _ends(ranges), ranges["duration_ns"].to_numpy()
    order = np.lexsort((durations, ends))
    names = ranges["name"].astype(str).to_numpy()[order]
    closed = np.searchsorted(ends[order], moments, side="right")
    return [names[count - 1] if count else None for count in closed]


def _by_device(kernels: pd.DataFrame) -> list[pd.DataFrame]:
    """The rows of each device in order of start."""
    ordered = kernels.sort_values("start_ns", kind="stable")
    return [rows for _, rows in ordered.groupby("device", sort=True)]


def _ends(frame: pd.DataFrame) -> Integers:
    ends: Integers = (frame["start_ns"] + frame["duration_ns"]).to_numpy()
    return ends
