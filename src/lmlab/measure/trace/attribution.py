"""Which call launched a kernel, and which ranges were open at that moment.

Launches are found by correlation id *and* process: every process counts its calls from one, so in
a report of two ranks each id occurs twice. Ranges are found by time within the process; ranges of
different threads may overlap without nesting, so a stack will not do. Instead the time axis is cut
where a range begins or ends: between two cuts the set of open ranges is constant, and one walk
over the cuts finds it for all launches. Ranges that hold no launch (most of the operator ranges of
a big report) are dropped before the walk, so a report of millions of ranges takes seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from lmlab.measure.trace.frames import (
    Coded,
    Integers,
    Path,
    Trace,
    api_kind,
    host_frame,
    kernels_frame,
    ranges_frame,
)

NOT_FOUND = -1
NO_CORRELATION = -1
STILL_OPEN = np.iinfo(np.int64).max
"""The end of a range that was not closed when the recording stopped."""

_CORRELATION_IDS = 2**33  # CUPTI's are unsigned 32 bit numbers


@dataclass(frozen=True)
class Work:
    """What ran on devices, as a tool recorded it: columns of equal length."""

    names: Coded[str]
    kinds: Coded[str]
    start_ns: Integers
    duration_ns: Integers
    stream: Integers
    device: Integers
    process: Integers
    correlation: Integers

    def take(self, rows: Integers) -> Work:
        """These rows of it."""
        return Work(**{name: column.take(rows) for name, column in vars(self).items()})

    @classmethod
    def stacked(cls, parts: Sequence[Work]) -> Work:
        """Several one below the other."""
        numbers = [name for name in vars(parts[0]) if name not in ("names", "kinds")]
        return cls(
            names=Coded.stacked([part.names for part in parts]),
            kinds=Coded.stacked([part.kinds for part in parts]),
            **{name: np.concatenate([vars(part)[name] for part in parts]) for name in numbers},
        )


@dataclass(frozen=True)
class Calls:
    """API calls of the host, as a tool recorded them."""

    names: Coded[str]
    start_ns: Integers
    duration_ns: Integers
    thread: Integers
    process: Integers
    correlation: Integers


@dataclass(frozen=True)
class Ranges:
    """Opened ranges; each holds the moments from its start up to, not including, its end."""

    names: Coded[str]
    start_ns: Integers
    end_ns: Integers
    thread: Integers
    process: Integers

    def frame(self, last_ns: int) -> pd.DataFrame:
        """As the ranges frame; what was never closed lasts until the recording's end."""
        ends = np.where(self.end_ns == STILL_OPEN, np.maximum(last_ns, self.start_ns), self.end_ns)
        return ranges_frame(
            names=self.names,
            start_ns=self.start_ns,
            duration_ns=ends - self.start_ns,
            thread=self.thread,
            process=self.process,
        )


def assemble(work: Work, calls: Calls, ranges: Ranges, tool: str) -> Trace:
    """The frames of what a tool recorded on a GPU and its host."""
    paths = paths_at(ranges, calls.process, calls.start_ns)
    launch = launching_calls(work, calls)
    kernels = kernels_frame(
        names=work.names,
        kinds=work.kinds,
        start_ns=work.start_ns,
        duration_ns=work.duration_ns,
        stream=work.stream,
        device=work.device,
        process=work.process,
        # Row NOT_FOUND is the last one, added for the kernels whose call was not recorded.
        launch_ns=np.append(calls.start_ns, 0)[launch],
        launch_known=launch != NOT_FOUND,
        paths=Coded(np.append(paths.codes, 0), paths.values).take(launch),
    )
    host = host_frame(
        names=calls.names,
        kinds=[api_kind(name) for name in calls.names.values],
        start_ns=calls.start_ns,
        duration_ns=calls.duration_ns,
        thread=calls.thread,
        process=calls.process,
        paths=paths,
    )
    ends = (work.start_ns + work.duration_ns, calls.start_ns + calls.duration_ns)
    last_ns = max((int(column.max()) for column in ends if len(column)), default=0)
    return Trace(kernels, host, ranges.frame(last_ns), tool)


def launching_calls(work: Work, calls: Calls) -> Integers:
    """Row of the call that launched each kernel, NOT_FOUND where it was not recorded.

    Where a runtime call and the driver call inside it share an id, the outer one, which began
    first, is the launch.
    """
    if not len(calls.process):
        return np.full(len(work.process), NOT_FOUND, dtype=np.int64)
    keys, call_keys = joint_keys(
        (work.process, work.correlation), (calls.process, calls.correlation)
    )
    order = np.lexsort((calls.start_ns, call_keys))
    place = np.searchsorted(call_keys[order], keys)
    row = order[np.minimum(place, len(order) - 1)]
    found = (call_keys[row] == keys) & (work.correlation != NO_CORRELATION)
    return np.where(found, row, NOT_FOUND)


def joint_keys(*columns: tuple[Integers, Integers]) -> list[Integers]:
    """Each (process, correlation) column pair as one number, equal where both are equal."""
    processes = np.unique(np.concatenate([process for process, _ in columns]))
    return [
        np.searchsorted(processes, process) * _CORRELATION_IDS + correlation
        for process, correlation in columns
    ]


def paths_at(ranges: Ranges, process: Integers, time_ns: Integers) -> Coded[Path]:
    """The ranges open in `process` at `time_ns`, outermost first, for each row of both."""
    known: dict[Path, int] = {(): 0}
    codes = np.zeros(len(time_ns), dtype=np.int64)
    for owner in np.unique(process):
        rows = np.flatnonzero(process == owner)
        times, inverse = np.unique(time_ns[rows], return_inverse=True)
        own = np.flatnonzero(ranges.process == owner)
        codes[rows] = _walk(ranges, own, times, known)[inverse]
    return Coded(codes, list(known))


def _walk(ranges: Ranges, own: Integers, times: Integers, known: dict[Path, int]) -> Integers:
    """Codes in `known` (which grows) of the paths at `times`, which ascend."""
    starts, ends = ranges.start_ns[own], ranges.end_ns[own]
    holds_some = np.searchsorted(times, starts) < np.searchsorted(times, ends)
    own, starts, ends = own[holds_some], starts[holds_some], ends[holds_some]
    # Of two ranges that open together the longer one is the outer one.
    opening = np.lexsort((-ends, starts))
    closing = np.argsort(ends, kind="stable")
    opened = np.searchsorted(starts[opening], times, side="right")
    closed = np.searchsorted(ends[closing], times, side="right")

    names, name_codes = ranges.names.values, ranges.names.codes[own]
    open_now: dict[int, str] = {}  # keeps the order of opening
    codes = np.empty(len(times), dtype=np.int64)
    already_opened = already_closed = code = 0
    for moment, (to_open, to_close) in enumerate(zip(opened, closed, strict=True)):
        if to_open > already_opened or to_close > already_closed:
            for row in opening[already_opened:to_open].tolist():
                open_now[row] = names[name_codes[row]]
            for row in closing[already_closed:to_close].tolist():
                del open_now[row]
            already_opened, already_closed = to_open, to_close
            code = known.setdefault(tuple(open_now.values()), len(known))
        codes[moment] = code
    return codes
