"""The three data frames that every profiler's output is converted to.

**kernels**, one row per activity on the device, ordered by start:

    name         full demangled name
    family       what it does (`kernel_names.family`)
    kind         kernel, memcpy, memset, op (CPU operator), graph (a CUDA graph not traced by node)
    start_ns     on the profiler's clock, which host and device share
    duration_ns  on a CPU: the operator's self time
    device       GPU index; CPU (-1) for a CPU
    launch_ns    start of the API call that launched it; missing if that call was not recorded
    delay_ns     start_ns - launch_ns: time between the launch call and execution
    ranges       names of the ranges open at launch, outermost first, as a tuple

**host**, one row per API call: name, kind (launch, synchronize, op, other), start_ns, duration_ns,
ranges. Calls nest, so do not add up durations of different kinds. On a CPU, the rows are the
bookkeeping operators. **ranges**, one row per opened range: name, start_ns, duration_ns.

A kernel belongs to the ranges that were open in its *process* when it was launched. Execution time
would be wrong because kernels run after the host has moved on; the launching thread would be wrong
because autograd launches the backward pass from its own thread, on which no range is open. Ranges
of different threads may overlap without nesting, so a stack is not enough: one sweep over the range
boundaries finds the open ranges of all launches. Ranges that contain no launch (most operator
ranges of a large report) are dropped first, so a report with millions of ranges takes seconds.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from lmlab.measure.trace import kernel_names

Integers = npt.NDArray[np.int64]
OpenRanges = tuple[str, ...]

CPU = -1  # the device of a CPU operator
NO_CORRELATION = -1
LAUNCH_KEY = ["process", "correlation"]
STILL_OPEN = np.iinfo(np.int64).max  # end of a range that was still open when the recording stopped
MAX_DEPTH = 1000  # ranges open at once; every launch keeps the names of all of them

RANGE_COLUMNS = ("name", "start_ns", "duration_ns")
HOST_COLUMNS = (*RANGE_COLUMNS, "kind", "ranges")
KERNEL_COLUMNS = (*HOST_COLUMNS, "family", "device", "launch_ns", "delay_ns")


class TraceError(ValueError):
    """A file that is not a readable trace."""


@dataclass(frozen=True)
class Trace:
    """One profiled run; `tool` is the profiler's name and version."""

    kernels: pd.DataFrame
    host: pd.DataFrame
    ranges: pd.DataFrame
    tool: str


def names(values: Iterable[str]) -> pd.Categorical:
    """A categorical column of names: one integer code per row."""
    codes, uniques = pd.factorize(np.array([*values], dtype=object))
    return pd.Categorical.from_codes(codes, pd.Index(uniques, dtype=object))


def objects(values: Sequence[Any]) -> npt.NDArray[np.object_]:
    """An object column of tuples, which numpy would otherwise turn into a 2-D array."""
    column = np.empty(len(values), dtype=object)
    column[:] = values
    return column


def assemble(work: pd.DataFrame, calls: pd.DataFrame, ranges: pd.DataFrame, tool: str) -> Trace:
    """Build a trace from what a tool recorded on a GPU and its host.

    work: name, kind, start_ns, duration_ns, device, process, correlation
    calls: name, start_ns, duration_ns, process, correlation
    ranges: name, start_ns, end_ns (exclusive), process
    """
    calls = calls.assign(
        kind=calls["name"].map(_api_kind).astype(object),
        ranges=paths_at(ranges, calls["process"].to_numpy(), calls["start_ns"].to_numpy()),
    )
    return trace_of(_with_launches(work, calls), calls, ranges, tool)


def trace_of(kernels: pd.DataFrame, host: pd.DataFrame, ranges: pd.DataFrame, tool: str) -> Trace:
    """Build a trace with derived columns; a range never closed lasts until the trace ends."""
    ends = pd.concat([frame["start_ns"] + frame["duration_ns"] for frame in (kernels, host)])
    last = ranges["start_ns"].clip(lower=ends.max() if len(ends) else 0)
    range_ends = ranges["end_ns"].mask(ranges["end_ns"] == STILL_OPEN, last)
    kernels = kernels.assign(
        family=_families(kernels),
        launch_ns=kernels["launch_ns"].astype("Int64"),
        delay_ns=(kernels["start_ns"] - kernels["launch_ns"]).astype("Int64"),
    )
    return Trace(
        _ordered(kernels, KERNEL_COLUMNS),
        _ordered(host, HOST_COLUMNS),
        _ordered(ranges.assign(duration_ns=range_ends - ranges["start_ns"]), RANGE_COLUMNS),
        tool,
    )


def _api_kind(name: str) -> str:
    """Whether an API call waits for the device, gives it work, or neither."""
    if "Synchronize" in name:
        return "synchronize"
    return "launch" if any(part in name for part in ("Launch", "Memcpy", "Memset")) else "other"


def _families(work: pd.DataFrame) -> pd.Series:
    """Family by name; in the optimizer's range all but matmuls and collectives are `optimizer`."""
    by_name = work["name"].map(kernel_names.family).astype(object)
    in_optimizer = work["ranges"].map(cache(kernel_names.is_optimizer)).astype(bool)
    keeps_its_own = by_name.isin([*kernel_names.MATMULS, "communication"])
    chosen = by_name.mask(in_optimizer & ~keeps_its_own, "optimizer")
    return chosen.astype(pd.CategoricalDtype(list(kernel_names.FAMILIES)))


def _ordered(frame: pd.DataFrame, columns: Sequence[str]) -> pd.DataFrame:
    if (frame["duration_ns"] < 0).any():
        raise TraceError("something ends before it starts")
    ordered = frame.sort_values("start_ns", kind="stable", ignore_index=True)[list(columns)]
    ordered["name"] = ordered["name"].cat.remove_unused_categories()
    return ordered


def _with_launches(work: pd.DataFrame, calls: pd.DataFrame) -> pd.DataFrame:
    """Add launch_ns and ranges from the launching call, where it was recorded.

    If a runtime call and the driver call inside it share an id, the outer one, which started first,
    is the launch.
    """
    launches = calls[calls["correlation"] != NO_CORRELATION]
    launches = launches.rename(columns={"start_ns": "launch_ns"})
    launches = launches.sort_values("launch_ns", kind="stable").drop_duplicates(LAUNCH_KEY)
    launches = launches[[*LAUNCH_KEY, "launch_ns", "ranges"]].astype({"launch_ns": "Int64"})
    found = work.merge(launches, how="left", on=LAUNCH_KEY)
    paths = [path if isinstance(path, tuple) else () for path in found["ranges"]]
    return found.assign(ranges=objects(paths))


def paths_at(ranges: pd.DataFrame, process: Integers, time_ns: Integers) -> npt.NDArray[np.object_]:
    """For each (process, time) pair, the ranges open then, outermost first."""
    paths = objects([()] * len(time_ns))
    for owner in np.unique(process):
        rows = np.flatnonzero(process == owner)
        times, inverse = np.unique(time_ns[rows], return_inverse=True)
        paths[rows] = _sweep(ranges[ranges["process"] == owner], times)[inverse]
    return paths


def _sweep(ranges: pd.DataFrame, times: Integers) -> npt.NDArray[np.object_]:
    """The open ranges of one process at ascending times."""
    first, last = (np.searchsorted(times, ranges[key]) for key in ("start_ns", "end_ns"))
    rows = ranges.loc[first < last, ["start_ns", "end_ns", "name"]].itertuples(index=False)
    # If two ranges open at the same time, the longer one is outer.
    waiting = deque(sorted(rows, key=lambda row: (row[0], -row[1])))
    open_now: list[Any] = []
    known: dict[OpenRanges, OpenRanges] = {}  # times with equal paths share one tuple
    paths = []
    for time in times.tolist():
        while waiting and waiting[0][0] <= time:
            open_now.append(waiting.popleft())
        open_now = [row for row in open_now if row[1] > time]
        if len(open_now) > MAX_DEPTH:
            raise TraceError(f"more than {MAX_DEPTH} ranges are open at once")
        path: OpenRanges = tuple(name for _, _, name in open_now)
        paths.append(known.setdefault(path, path))
    return objects(paths)
