"""A trace reduced to what tables and sentences need: kilobytes instead of megabytes.

A capture may hold several runs, each in a range of its own (`section`); each is digested by itself:

    kernels, total_ns, busy_ns, span_ns   number, work, elapsed work, first start to last end
    phases     the same by phase, with host_ns that the host spent in its range
    families   total_ns and instances of each family that occurs
    table      the kernel summary as columns, copies left out as nsys does; `name` is an index into
               the digest's list of names, so that a long name is kept whole and kept once
    rest       what the table's last rows, past TABLE_ROWS, add up to
    copies     what the copy engines did, which no kernel table has
    host       where the host waited, how far it ran ahead, which gaps on the device it left

Everything is plain numbers and text, ready for JSON.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd

from lmlab.measure.trace.families import family
from lmlab.measure.trace.frames import Trace
from lmlab.measure.trace.gpu_time import busy_ns, launch_gaps, phase_times, span_ns, waits
from lmlab.measure.trace.gpu_time import slow_ranges as find_slow_ranges
from lmlab.measure.trace.summary import family_totals, kernel_summary, within, without_copies

TABLE_ROWS = 80
MOST_WAITS = 5
MOST_GAPS = 5
MOST_CALLS = 8
MOST_SLOW_RANGES = 8

_COUNTED = ("instances", "total_ns", "min_ns", "max_ns")
_FRACTIONAL = ("avg_ns", "med_ns", "sd_ns")


class Names:
    """Whole kernel names, each kept once with its short form and the family that it tells."""

    def __init__(self) -> None:
        self._index: dict[str, int] = {}
        self._rows: list[dict[str, str]] = []

    def add(self, name: str, short_name: str) -> int:
        """Where the name stands in the list."""
        if name not in self._index:
            self._index[name] = len(self._rows)
            self._rows.append({"name": name, "short_name": short_name, "family": family(name)})
        return self._index[name]

    def rows(self) -> list[dict[str, str]]:
        """All of them, in order."""
        return self._rows


def section(trace: Trace, name: str) -> Trace:
    """What was launched, called and opened within the range of that name."""
    own = trace.ranges[trace.ranges["name"] == name]
    if own.empty:
        return Trace(trace.kernels.iloc[:0], trace.host.iloc[:0], trace.ranges.iloc[:0], trace.tool)
    start = int(own["start_ns"].min())
    end = int((own["start_ns"] + own["duration_ns"]).max())
    inside = trace.ranges["start_ns"].ge(start) & trace.ranges["start_ns"].lt(end)
    return Trace(
        kernels=within(trace.kernels, name).reset_index(drop=True),
        host=within(trace.host, name).reset_index(drop=True),
        ranges=trace.ranges[inside].reset_index(drop=True),
        tool=trace.tool,
    )


def digest(run: Trace, phases: Sequence[str], names: Names) -> dict[str, Any]:
    """One run of a trace; see the module's docstring."""
    kernels = run.kernels
    compute = without_copies(kernels)
    summary = kernel_summary(compute)
    return {
        "kernels": len(kernels),
        "total_ns": int(kernels["duration_ns"].sum()),
        "busy_ns": busy_ns(kernels),
        "span_ns": span_ns(kernels),
        "phases": [_phase(run, phase) for phase in phases],
        "families": families_of(kernels),
        "table": _columns(summary.head(TABLE_ROWS), names),
        "rest": _added_up(summary.iloc[TABLE_ROWS:]),
        "copies": {
            "instances": len(kernels) - len(compute),
            "total_ns": int(kernels["duration_ns"].sum() - compute["duration_ns"].sum()),
        },
        "host": host_side(run),
    }


def families_of(kernels: pd.DataFrame) -> dict[str, dict[str, int]]:
    """Families that occur: total_ns and instances."""
    totals = family_totals(kernels)
    return {
        str(row["family"]): {"total_ns": int(row["total_ns"]), "instances": int(row["instances"])}
        for _, row in totals[totals["instances"] > 0].iterrows()
    }


def _phase(run: Trace, phase: str) -> dict[str, Any]:
    times = phase_times(run, [phase]).iloc[0]
    counted = ("kernels", "total_ns", "busy_ns", "span_ns", "host_ns")
    return {"phase": phase, **{name: int(times[name]) for name in counted}}


def _columns(summary: pd.DataFrame, names: Names) -> dict[str, list[Any]]:
    shorts = zip(summary["name"], summary["short_name"], strict=True)
    return {
        "name": [names.add(name, short) for name, short in shorts],
        **{column: summary[column].astype("int64").tolist() for column in _COUNTED},
        **{column: summary[column].round(1).tolist() for column in _FRACTIONAL},
    }


def _added_up(summary: pd.DataFrame) -> dict[str, int]:
    return {
        "names": len(summary),
        "instances": int(summary["instances"].sum()),
        "total_ns": int(summary["total_ns"].sum()),
    }


def host_side(run: Trace) -> dict[str, Any]:
    """What the host did meanwhile: waits, launches, gaps that it left on the device."""
    found = waits(run)
    gaps = launch_gaps(run.kernels)
    delays = run.kernels["delay_ns"].dropna()
    return {
        "wait_ns": int(found["duration_ns"].sum()),
        "waits": [_wait(row) for _, row in found.head(MOST_WAITS).iterrows()],
        "launches": int((run.host["kind"] == "launch").sum()),
        "delay_median_ns": int(delays.median()) if len(delays) else None,
        "delay_max_ns": int(delays.max()) if len(delays) else None,
        "gap_ns": int(gaps["gap_ns"].sum()),
        "host_late_gap_ns": int(gaps["gap_ns"][gaps["host_late"]].sum()),
        "gaps": int((gaps["gap_ns"] > 0).sum()),
        "longest_gaps": _longest_gaps(run.kernels, gaps),
        "calls": _calls(run.host),
    }


def _wait(row: pd.Series) -> dict[str, Any]:
    after = row["after"]
    return {
        "name": str(row["name"]),
        "after": None if pd.isna(after) else str(after),
        "duration_ns": int(row["duration_ns"]),
    }


def _longest_gaps(kernels: pd.DataFrame, gaps: pd.DataFrame) -> list[dict[str, Any]]:
    longest = gaps[gaps["gap_ns"] > 0].nlargest(MOST_GAPS, "gap_ns")
    rows = longest.join(kernels[["short_name", "ranges"]])
    return [
        {
            "gap_ns": int(row["gap_ns"]),
            "host_late": bool(row["host_late"]),
            "before": str(row["short_name"]),
            "ranges": list(row["ranges"]),
        }
        for _, row in rows.iterrows()
    ]


def _calls(host: pd.DataFrame) -> list[dict[str, Any]]:
    """The calls that took the host most time, by name."""
    totals = host.groupby("name", observed=True)["duration_ns"].agg(["size", "sum"])
    return [
        {"name": str(name), "calls": int(row["size"]), "total_ns": int(row["sum"])}
        for name, row in totals.nlargest(MOST_CALLS, "sum").iterrows()
    ]


def slow_ranges(trace: Trace, sections: Sequence[str]) -> list[dict[str, Any]]:
    """Ranges of the whole capture that took many times their median, and in which run."""
    table = find_slow_ranges(trace, most=MOST_SLOW_RANGES)
    return [
        {
            "range": str(row["name"]),
            "run": _section_at(trace, int(row["start_ns"]), sections),
            "duration_ns": int(row["duration_ns"]),
            "median_ns": int(row["median_ns"]),
            "instances": int(row["instances"]),
            "kernel": row["kernel"],
            "call": row["call"],
        }
        for _, row in table.iterrows()
    ]


def _section_at(trace: Trace, moment_ns: int, sections: Sequence[str]) -> str | None:
    opened = trace.ranges[trace.ranges["name"].isin(sections)]
    ends = opened["start_ns"] + opened["duration_ns"]
    holding = opened[(opened["start_ns"] <= moment_ns) & (moment_ns < ends)]
    return None if holding.empty else str(holding["name"].iloc[0])
