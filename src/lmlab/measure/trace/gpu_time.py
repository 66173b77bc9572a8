"""Elapsed time on the device: when it worked, when it waited, and for whom.

Kernels overlap on several streams, so the busy time of a device is the union of their intervals.
A phase's *span* runs from the start of its first kernel to the end of its last; what of the span is
not busy is the device waiting. It nearly always waits for the host: a kernel cannot start before it
is launched, and a gap before a kernel that was launched only after the device had run dry is the
host's (`host_late`). The share of such waiting is the phase's host-bound share. It is an upper
bound: a profiler slows the host and not the kernels.

The span starts with the first kernel, not with the range on the host, because the device may still
be busy with the phase before. On a CPU the same formulas give the share of time in which Python and
dispatch ran and no operator did its work.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pandas as pd

from lmlab.measure.trace.frames import Integers, Trace
from lmlab.measure.trace.summary import within

_FEWEST_FOR_A_MEDIAN = 3


def busy_ns(kernels: pd.DataFrame) -> int:
    """Nanoseconds in which anything ran, added over devices."""
    return span_ns(kernels) - int(launch_gaps(kernels)["gap_ns"].sum())


def span_ns(kernels: pd.DataFrame) -> int:
    """From the first start to the last end, added over devices."""
    return sum(int(_ends(rows).max() - rows["start_ns"].min()) for rows in _by_device(kernels))


def host_bound_share(kernels: pd.DataFrame) -> float:
    """Share of the span in which nothing ran; NaN without kernels."""
    span = span_ns(kernels)
    return 1.0 - busy_ns(kernels) / span if span else float("nan")


def launch_gaps(kernels: pd.DataFrame) -> pd.DataFrame:
    """For each row: gap_ns for which its device lay idle before it, host_late if not yet launched.

    The frame has the index of `kernels`. Gaps are those of the rows given: pass all kernels of a
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


def phase_times(trace: Trace, phases: Iterable[str]) -> pd.DataFrame:
    """By phase: kernels, total_ns, busy_ns, span_ns, host_bound_share, host_ns of its range."""
    rows = []
    for phase in phases:
        own = within(trace.kernels, phase)
        host = trace.ranges.loc[trace.ranges["name"] == phase, "duration_ns"].sum()
        times = (int(own["duration_ns"].sum()), busy_ns(own), span_ns(own))
        rows.append((phase, len(own), *times, host_bound_share(own), int(host)))
    columns = ["range", "kernels", "total_ns", "busy_ns", "span_ns", "host_bound_share", "host_ns"]
    return pd.DataFrame(rows, columns=columns)


def waits(trace: Trace) -> pd.DataFrame:
    """Calls in which the host waited, longest first; `after` is the range that had closed last."""
    calls = trace.host[trace.host["kind"] == "synchronize"].copy()
    calls["after"] = pd.Series(None, index=calls.index, dtype=object)
    for process, rows in calls.groupby("process"):
        ranges = trace.ranges[trace.ranges["process"] == process]
        calls.loc[rows.index, "after"] = _closed_last(ranges, rows["start_ns"].to_numpy())
    return calls.sort_values("duration_ns", ascending=False, kind="stable", ignore_index=True)


def slow_ranges(
    trace: Trace, times: float = 5.0, at_least_ns: int = 100_000, most: int = 20
) -> pd.DataFrame:
    """The ranges that took more than `times` their name's median, longest first, and what ran.

    `kernel` is the short name of the kernel with the most time of those launched in it, `call` the
    API call in which the host spent the most; None where there was none. Ranges shorter than
    `at_least_ns` are slow by chance, and of the others `most` are enough.
    """
    named = trace.ranges.groupby("name", observed=True)["duration_ns"]
    ranges = trace.ranges.assign(
        median_ns=named.transform("median"), instances=named.transform("size")
    )
    ranges["times_median"] = ranges["duration_ns"] / ranges["median_ns"]
    slow = (ranges["times_median"] > times) & (ranges["instances"] >= _FEWEST_FOR_A_MEDIAN)
    table = ranges[slow & (ranges["duration_ns"] >= at_least_ns)]
    table = table.nlargest(most, "duration_ns").reset_index(drop=True)
    kernels = [_most_in(trace.kernels, "launch_ns", "short_name", row) for row in _of(table)]
    calls = [_most_in(trace.host, "start_ns", "name", row) for row in _of(table)]
    return table.assign(
        kernel=pd.Series(kernels, dtype=object), call=pd.Series(calls, dtype=object)
    )


def _of(ranges: pd.DataFrame) -> Iterable[tuple[int, int, int]]:
    """(process, start, end) of each range."""
    ends = ranges["start_ns"] + ranges["duration_ns"]
    return zip(ranges["process"], ranges["start_ns"], ends, strict=True)


def _most_in(
    frame: pd.DataFrame, moment: str, name: str, interval: tuple[int, int, int]
) -> str | None:
    """The name with the most time among the rows whose moment lies in the interval."""
    process, start, end = interval
    inside = (frame[moment] >= start) & (frame[moment] < end) & (frame["process"] == process)
    rows = frame[inside.fillna(False).astype(bool)]
    totals = rows.groupby(name, observed=True)["duration_ns"].sum()
    return None if totals.empty else str(totals.idxmax())


def _closed_last(ranges: pd.DataFrame, moments: Integers) -> list[str | None]:
    """Name of the range that had closed last; of those that closed together the outermost."""
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
