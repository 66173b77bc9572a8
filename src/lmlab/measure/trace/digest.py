"""Summaries of a traced run: device times, a table by kernel, host activity, timelines.

A capture may hold several runs, each in a separate range; `section` cuts one out. Kernels on
different streams overlap, so their total is work, not elapsed time; a device's busy time is the
union of their intervals. A phase's *span* starts with its first kernel and not with its range on
the host, because the device may still be busy with the previous phase. A gap before a kernel that
was launched only after the device went idle is the host's fault (`host_late`); since a profiler
slows the host and not the kernels, such gaps are an upper bound on how host-bound a phase is. On a
CPU, a gap is time spent in Python and dispatch rather than in an operator that does work.
"""

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from lmlab.measure.records import plain_rows
from lmlab.measure.trace.frames import Trace

MAX_CALLS = 8
MAX_KERNELS_OF_LAYER = 200
_LAYER = re.compile(r".*\.\d+")


def is_copy(kernels: pd.DataFrame) -> pd.Series:
    """Mask of the copies and memsets, which compute nothing and appear in no kernel table."""
    return kernels["kind"].isin(("memcpy", "memset"))


def within(rows: pd.DataFrame, name: str) -> pd.DataFrame:
    """The kernels or host calls that were launched inside a range of that name."""
    return rows[np.array([name in path for path in rows["ranges"]], dtype=bool)]


def section(trace: Trace, name: str) -> Trace:
    """The part of a trace that was launched, called or opened within the range of that name."""
    own = trace.ranges[trace.ranges["name"] == name]
    first, last = own["start_ns"].min(), _ends(own).max()
    ranges = trace.ranges[trace.ranges["start_ns"].between(first, last, inclusive="left")]
    return Trace(within(trace.kernels, name), within(trace.host, name), ranges, trace.tool)


def kernel_summary(kernels: pd.DataFrame) -> pd.DataFrame:
    """One row per kernel name, largest total first.

    Matches `nsys stats --report cuda_gpu_kern_sum`, which excludes copies and memsets; `sd_ns` is
    the sample standard deviation, 0 for a single instance.
    """
    computing = kernels[~is_copy(kernels)].astype({"name": object})
    table: Any = computing.groupby("name")["duration_ns"].agg(
        total_ns="sum",
        instances="size",
        avg_ns="mean",
        med_ns="median",
        min_ns="min",
        max_ns="max",
        sd_ns="std",
    )
    # Ties stay in order of name, so that the table is the same every time.
    ordered = table.sort_values("total_ns", ascending=False, kind="stable")
    return ordered.fillna({"sd_ns": 0.0}).reset_index()


def device_times(kernels: pd.DataFrame) -> dict[str, int]:
    """Number of kernels, sum of their durations, busy time, and first start to last end."""
    return {
        "kernels": len(kernels),
        "total_ns": int(kernels["duration_ns"].sum()),
        "busy_ns": busy_ns(kernels),
        "span_ns": span_ns(kernels),
    }


def host_side(run: Trace) -> dict[str, float | None]:
    """Host activity: waits, launches and their delays; and the gaps on the device."""
    waits = run.host[run.host["kind"] == "synchronize"]
    launches = run.host[run.host["name"].astype(str).str.contains("Launch")]
    gaps = launch_gaps(run.kernels)
    delays = run.kernels["delay_ns"].dropna()
    return {
        "wait_ns": int(waits["duration_ns"].sum()),
        "launches": int((run.host["kind"] == "launch").sum()),
        "delay_median_ns": int(delays.median()) if len(delays) else None,
        "delay_max_ns": int(delays.max()) if len(delays) else None,
        "gap_ns": int(gaps["gap_ns"].sum()),
        "host_late_gap_ns": int(gaps["gap_ns"][gaps["host_late"]].sum()),
        "gaps": int((gaps["gap_ns"] > 0).sum()),
        "launch_ns": float(launches["duration_ns"].mean()) if len(launches) else None,
    }


def host_calls(run: Trace) -> list[dict[str, Any]]:
    """The API calls (on a CPU, bookkeeping operators) in which the host spent most time."""
    durations: Any = run.host.groupby("name", observed=True)["duration_ns"]
    calls = durations.agg(total_ns="sum", calls="size")
    return plain_rows(calls.nlargest(MAX_CALLS, "total_ns").reset_index())


def busy_ns(kernels: pd.DataFrame) -> int:
    """Nanoseconds in which a device was busy, summed over devices."""
    return span_ns(kernels) - int(launch_gaps(kernels)["gap_ns"].sum())


def span_ns(kernels: pd.DataFrame) -> int:
    """From the first start to the last end, summed over devices."""
    first = kernels.groupby("device")["start_ns"].min()
    return int((_ends(kernels).groupby(kernels["device"]).max() - first).sum())


def launch_gaps(kernels: pd.DataFrame) -> pd.DataFrame:
    """Per row: gap_ns, the idle time before it, and host_late, if it was launched during the gap.

    Indexed like `kernels`. Gaps are between the given rows: pass all kernels of a device, or those
    of one phase.
    """
    rows = kernels.sort_values("start_ns", kind="stable")
    # Int64 allows missing values; float64 cannot hold nanoseconds exactly.
    latest = _ends(rows).astype("Int64").groupby(rows["device"]).cummax()
    earlier = latest.groupby(rows["device"]).shift()
    gap_ns = (rows["start_ns"] - earlier).clip(lower=0).fillna(0).astype("int64")
    host_late = (rows["launch_ns"] > earlier).fillna(False).astype(bool) & (gap_ns > 0)
    return pd.DataFrame({"gap_ns": gap_ns, "host_late": host_late}).reindex(kernels.index)


def timeline(run: Trace, phases: Sequence[str]) -> dict[str, Any]:
    """When host and device were in each phase, relative to the start of the run's range on the
    host. On the device, a phase runs from its first kernel to its last."""
    origin = run.ranges["start_ns"].min()  # the run's own range opens before anything in it
    on_host = {phase: run.ranges[run.ranges["name"] == phase] for phase in phases}
    on_device = {phase: within(run.kernels, phase) for phase in phases}

    def intervals(found: dict[str, pd.DataFrame]) -> list[dict[str, Any]]:
        return [
            {
                "phase": phase,
                "start_ns": int(rows["start_ns"].min() - origin),
                "duration_ns": int(_ends(rows).max() - rows["start_ns"].min()),
            }
            for phase, rows in found.items()
            if len(rows)
        ]

    return {"host_phases": intervals(on_host), "device_phases": intervals(on_device)}


def one_layer(run: Trace, phase: str, parts: Sequence[str]) -> dict[str, Any] | None:
    """Every kernel of the middle layer in a phase; None if no layer is marked."""
    kernels = within(run.kernels, phase)
    in_order = (name for path in kernels["ranges"] for name in path if _LAYER.fullmatch(name))
    layers = list(dict.fromkeys(in_order))
    if not layers:
        return None
    layer = layers[len(layers) // 2]
    rows = within(kernels, layer).head(MAX_KERNELS_OF_LAYER)
    return {
        "layer": layer,
        "start_ns": (rows["start_ns"] - rows["start_ns"].min()).tolist(),
        "duration_ns": rows["duration_ns"].tolist(),
        "name": rows["name"].astype(str).tolist(),
        "part": [next((name for name in path if name in parts), None) for path in rows["ranges"]],
    }


def _ends(frame: pd.DataFrame) -> pd.Series:
    return frame["start_ns"] + frame["duration_ns"]
