"""A trace reduced to the numbers that tables and text need: kilobytes instead of megabytes.

A capture may hold several runs, each in a separate range (`section`) and with its own digest:

    kernels, total_ns, busy_ns, span_ns   number, work, elapsed work, first start to last end
    phases     the same by phase, with host_ns, the time the host spent in the phase's range
    families   total_ns and instances of each family that occurs
    table      the kernel summary by column, without copies as in nsys; `name` is an index into the
               digest's list of names, so that a long name is stored in full and only once
    rest       what the rows of the table beyond TABLE_ROWS add up to
    copies     what the copy engines did, which no kernel table has
    host       where the host waited, how far ahead it ran, which gaps it left on the device

Everything is plain numbers and text, ready for JSON.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd

from lmlab.measure.trace.families import family
from lmlab.measure.trace.frames import Trace
from lmlab.measure.trace.gpu_time import busy_ns, launch_gaps, span_ns, waits
from lmlab.measure.trace.gpu_time import slow_ranges as find_slow_ranges
from lmlab.measure.trace.summary import (
    family_totals,
    kernel_summary,
    records,
    within,
    without_copies,
)

TABLE_ROWS = 80
MAX_WAITS = 5
MAX_GAPS = 5
MAX_CALLS = 8
MAX_SLOW_RANGES = 8

_INTEGER_COLUMNS = ("instances", "total_ns", "min_ns", "max_ns")
_FLOAT_COLUMNS = ("avg_ns", "med_ns", "sd_ns")


class Names:
    """Full kernel names, each stored once with its short form and its family."""

    def __init__(self) -> None:
        self._index: dict[str, int] = {}
        self._rows: list[dict[str, str]] = []

    def add(self, name: str, short_name: str) -> int:
        """The name's index in the list."""
        if name not in self._index:
            self._index[name] = len(self._rows)
            self._rows.append({"name": name, "short_name": short_name, "family": family(name)})
        return self._index[name]

    def add_all(self, rows: pd.DataFrame) -> list[int]:
        """The indices of a frame's names."""
        pairs = zip(rows["name"].astype(str), rows["short_name"].astype(str), strict=True)
        return [self.add(*pair) for pair in pairs]

    def rows(self) -> list[dict[str, str]]:
        """All names in order."""
        return self._rows


def section(trace: Trace, name: str) -> Trace:
    """What was launched, called and opened within the range of that name."""
    own = trace.ranges[trace.ranges["name"] == name]
    ends = own["start_ns"] + own["duration_ns"]
    starts = trace.ranges["start_ns"]
    inside = starts.ge(own["start_ns"].min()) & starts.lt(ends.max())
    return Trace(
        kernels=within(trace.kernels, name).reset_index(drop=True),
        host=within(trace.host, name).reset_index(drop=True),
        ranges=trace.ranges[inside].reset_index(drop=True),
        tool=trace.tool,
    )


def digest(run: Trace, phases: Sequence[str], names: Names) -> dict[str, Any]:
    """One run of a trace; see the module's docstring."""
    compute = without_copies(run.kernels)
    summary = kernel_summary(compute)
    table, rest = summary.head(TABLE_ROWS), summary.iloc[TABLE_ROWS:]
    times = _times(run.kernels)
    return {
        **times,
        "phases": [_phase(run, phase) for phase in phases],
        "families": family_totals(run.kernels).to_dict("index"),
        "table": {
            "name": names.add_all(table),
            **{column: table[column].astype("int64").tolist() for column in _INTEGER_COLUMNS},
            **{column: table[column].round(1).tolist() for column in _FLOAT_COLUMNS},
        },
        "rest": {
            "names": len(rest),
            "instances": int(rest["instances"].sum()),
            "total_ns": int(rest["total_ns"].sum()),
        },
        "copies": {
            "instances": len(run.kernels) - len(compute),
            "total_ns": times["total_ns"] - int(compute["duration_ns"].sum()),
        },
        "host": host_side(run),
    }


def _times(kernels: pd.DataFrame) -> dict[str, int]:
    return {
        "kernels": len(kernels),
        "total_ns": int(kernels["duration_ns"].sum()),
        "busy_ns": busy_ns(kernels),
        "span_ns": span_ns(kernels),
    }


def _phase(run: Trace, phase: str) -> dict[str, Any]:
    host_ns = run.ranges.loc[run.ranges["name"] == phase, "duration_ns"].sum()
    return {"phase": phase, **_times(within(run.kernels, phase)), "host_ns": int(host_ns)}


def host_side(run: Trace) -> dict[str, Any]:
    """What the host did meanwhile: waits, launches, gaps that it left on the device."""
    found = waits(run)
    gaps = launch_gaps(run.kernels)
    delays = run.kernels["delay_ns"].dropna()
    return {
        "wait_ns": int(found["duration_ns"].sum()),
        "waits": records(found.head(MAX_WAITS)[["name", "after", "duration_ns"]]),
        "launches": int((run.host["kind"] == "launch").sum()),
        "delay_median_ns": int(delays.median()) if len(delays) else None,
        "delay_max_ns": int(delays.max()) if len(delays) else None,
        "gap_ns": int(gaps["gap_ns"].sum()),
        "host_late_gap_ns": int(gaps["gap_ns"][gaps["host_late"]].sum()),
        "gaps": int((gaps["gap_ns"] > 0).sum()),
        "longest_gaps": _longest_gaps(run.kernels, gaps),
        "calls": _calls(run.host),
    }


def _longest_gaps(kernels: pd.DataFrame, gaps: pd.DataFrame) -> list[dict[str, Any]]:
    longest = gaps[gaps["gap_ns"] > 0].nlargest(MAX_GAPS, "gap_ns")
    rows = longest.join(kernels[["short_name", "ranges"]]).rename(columns={"short_name": "before"})
    return records(rows.assign(ranges=rows["ranges"].map(list)))


def _calls(host: pd.DataFrame) -> list[dict[str, Any]]:
    """The API calls with the largest total time, by name."""
    durations = host.groupby("name", observed=True)["duration_ns"]
    totals = pd.DataFrame({"calls": durations.size(), "total_ns": durations.sum()})
    return records(totals.nlargest(MAX_CALLS, "total_ns").reset_index())


def slow_ranges(trace: Trace, sections: Sequence[str]) -> list[dict[str, Any]]:
    """Ranges of the whole capture that took many times their median, and in which run."""
    table = find_slow_ranges(trace, most=MAX_SLOW_RANGES).rename(columns={"name": "range"})
    runs = [_section_at(trace, start, sections) for start in table["start_ns"]]
    table = table.assign(
        run=pd.Series(runs, dtype=object), median_ns=table["median_ns"].astype("int64")
    )
    kept = ["range", "run", "duration_ns", "median_ns", "instances", "kernel", "call"]
    return records(table[kept])


def _section_at(trace: Trace, moment_ns: int, sections: Sequence[str]) -> str | None:
    opened = trace.ranges[trace.ranges["name"].isin(sections)]
    ends = opened["start_ns"] + opened["duration_ns"]
    holding = opened[(opened["start_ns"] <= moment_ns) & (moment_ns < ends)]
    return None if holding.empty else str(holding["name"].iloc[0])
