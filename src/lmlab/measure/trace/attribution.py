"""Which call launched a kernel, and which ranges were open at that moment.

A kernel is matched to its launch by correlation id *and* process: every process counts its calls
from one, so in a report of two ranks each id occurs twice. Ranges are matched by time within the
process. Ranges of different threads may overlap without nesting, so a stack is not enough: the set
of open ranges is constant between two range boundaries, and one sweep over the boundaries finds it
for all launches. Ranges that contain no launch (most operator ranges of a large report) are dropped
before the sweep, so a report with millions of ranges takes seconds.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pandas as pd

from lmlab.measure.trace.frames import (
    Integers,
    Path,
    Trace,
    TraceError,
    api_kind,
    host_frame,
    kernels_frame,
    objects,
    ranges_frame,
)

NO_CORRELATION = -1
LAUNCH_KEY = ["process", "correlation"]
STILL_OPEN = np.iinfo(np.int64).max
"""End of a range that was still open when the recording stopped."""

MAX_DEPTH = 1000
"""Ranges open at once; every launch keeps the names of all of them."""


def assemble(work: pd.DataFrame, calls: pd.DataFrame, ranges: pd.DataFrame, tool: str) -> Trace:
    """The frames of what a tool recorded on a GPU and its host.

    work: name, kind, start_ns, duration_ns, stream, device, process, correlation
    calls: name, start_ns, duration_ns, thread, process, correlation
    ranges: name, start_ns, end_ns (exclusive), thread, process
    """
    calls = calls.assign(
        kind=calls["name"].map(api_kind).astype(object),
        ranges=paths_at(ranges, calls["process"].to_numpy(), calls["start_ns"].to_numpy()),
    )
    ends = pd.concat([frame["start_ns"] + frame["duration_ns"] for frame in (work, calls)])
    last_ns = int(ends.max()) if len(ends) else 0
    kernels = kernels_frame(_with_launches(work, calls))
    return Trace(kernels, host_frame(calls), closed_ranges(ranges, last_ns), tool)


def closed_ranges(ranges: pd.DataFrame, last_ns: int) -> pd.DataFrame:
    """The ranges frame; a range that was never closed lasts until the end of the recording."""
    until = ranges["start_ns"].clip(lower=last_ns)
    ends = ranges["end_ns"].mask(ranges["end_ns"] == STILL_OPEN, until)
    return ranges_frame(ranges.assign(duration_ns=ends - ranges["start_ns"]))


def _with_launches(work: pd.DataFrame, calls: pd.DataFrame) -> pd.DataFrame:
    """Adds launch_ns and ranges from the launching call, where it was recorded.

    If a runtime call and the driver call inside it share an id, the outer one is the launch; it
    started first.
    """
    launches = calls.loc[
        calls["correlation"] != NO_CORRELATION, [*LAUNCH_KEY, "start_ns", "ranges"]
    ]
    launches = launches.sort_values("start_ns", kind="stable").drop_duplicates(LAUNCH_KEY)
    launches = launches.rename(columns={"start_ns": "launch_ns"}).astype({"launch_ns": "Int64"})
    found = work.merge(launches, how="left", on=LAUNCH_KEY)
    known = found["launch_ns"].notna()
    paths = [path if has else () for path, has in zip(found["ranges"], known, strict=True)]
    return found.assign(ranges=objects(paths))


def paths_at(ranges: pd.DataFrame, process: Integers, time_ns: Integers) -> npt.NDArray[np.object_]:
    """The ranges open in `process` at `time_ns`, outermost first, for each row of both."""
    known: dict[Path, Path] = {}  # rows with equal paths share one tuple
    paths = objects([()] * len(time_ns))
    for owner in np.unique(process):
        rows = np.flatnonzero(process == owner)
        times, inverse = np.unique(time_ns[rows], return_inverse=True)
        paths[rows] = _sweep(ranges[ranges["process"] == owner], times, known)[inverse]
    return paths


def _sweep(
    ranges: pd.DataFrame, times: Integers, known: dict[Path, Path]
) -> npt.NDArray[np.object_]:
    """The paths of one process at ascending times."""
    holds_some = np.searchsorted(times, ranges["start_ns"]) < np.searchsorted(
        times, ranges["end_ns"]
    )
    ranges = ranges[holds_some]
    names = ranges["name"].astype(object).to_numpy()
    starts, ends = ranges["start_ns"].to_numpy(), ranges["end_ns"].to_numpy()
    # Of two ranges that open together, the longer one is the outer one.
    opening = np.lexsort((-ends, starts))
    closing = np.argsort(ends, kind="stable")
    opened = np.searchsorted(starts[opening], times, side="right")
    closed = np.searchsorted(ends[closing], times, side="right")

    open_now: dict[int, str] = {}  # in order of opening
    paths = np.empty(len(times), dtype=object)
    path: Path = ()
    already_opened = already_closed = 0
    for moment, (to_open, to_close) in enumerate(zip(opened, closed, strict=True)):
        if to_open > already_opened or to_close > already_closed:
            for row in opening[already_opened:to_open].tolist():
                open_now[row] = names[row]
            for row in closing[already_closed:to_close].tolist():
                del open_now[row]
            already_opened, already_closed = to_open, to_close
            if len(open_now) > MAX_DEPTH:
                raise TraceError(f"more than {MAX_DEPTH} ranges are open at once")
            path = tuple(open_now.values())
            path = known.setdefault(path, path)
        paths[moment] = path
    return paths
