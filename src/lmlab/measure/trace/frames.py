"""The three data frames that every profiler's output is converted to: kernels, host calls, ranges.

**kernels**, one row per activity on the device, ordered by start:

    name         full demangled name
    short_name   the same, shortened for tables (`short_names`)
    family       what it does (`families`)
    kind         kernel, memcpy, memset, op (CPU operator), graph (a CUDA graph not traced by node)
    start_ns     on the profiler's clock, which host and device share
    duration_ns  on a CPU: the operator's self time
    stream       CUDA stream; on a CPU the thread
    device       GPU index; CPU (-1) for a CPU
    process      process id
    launch_ns    start of the API call that launched it; missing if that call was not recorded
    delay_ns     start_ns - launch_ns: time between the launch call and execution
    ranges       names of the ranges open at launch, outermost first, as a tuple

**host**, one row per API call: name, kind (launch, synchronize, op, other), start_ns, duration_ns,
thread, process, ranges. Calls nest (a runtime call can enter the driver), so durations of different
kinds must not be added. On a CPU its rows are the operators that move no data (views, allocation,
dispatch), with their self time.

**ranges**, one row per opened range: name, start_ns, duration_ns, thread, process.

A kernel belongs to the ranges that were open in its *process* when it was launched. Execution time
would be wrong because kernels run after the host has moved on; the launching thread would be wrong
because autograd launches the backward pass from its own thread, on which no range is open.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from lmlab.measure.trace import families
from lmlab.measure.trace.short_names import shorten

Integers = npt.NDArray[np.int64]
Path = tuple[str, ...]

CPU = -1
"""The device of a CPU operator."""

KINDS = pd.CategoricalDtype(["kernel", "memcpy", "memset", "graph", "op"])
HOST_KINDS = pd.CategoricalDtype(["launch", "synchronize", "op", "other"])

KERNEL_COLUMNS = (
    *("name", "short_name", "family", "kind", "start_ns", "duration_ns"),
    *("stream", "device", "process", "launch_ns", "delay_ns", "ranges"),
)
HOST_COLUMNS = ("name", "kind", "start_ns", "duration_ns", "thread", "process", "ranges")
RANGE_COLUMNS = ("name", "start_ns", "duration_ns", "thread", "process")


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
    """A column of few distinct names, one code per row."""
    codes, uniques = pd.factorize(np.array([*values], dtype=object))
    return pd.Categorical.from_codes(codes, pd.Index(uniques, dtype=object))


def objects(values: Sequence[Any]) -> npt.NDArray[np.object_]:
    """A column of tuples; numpy would make a two-dimensional array of them."""
    column = np.empty(len(values), dtype=object)
    column[:] = values
    return column


def kernels_frame(work: pd.DataFrame) -> pd.DataFrame:
    """The kernels frame from its recorded columns; the derived ones are added here."""
    return _ordered(
        work.assign(
            short_name=work["name"].map(shorten).astype("category"),
            family=_families(work),
            kind=work["kind"].astype(KINDS),
            launch_ns=work["launch_ns"].astype("Int64"),
            delay_ns=(work["start_ns"] - work["launch_ns"]).astype("Int64"),
        ),
        KERNEL_COLUMNS,
    )


def host_frame(calls: pd.DataFrame) -> pd.DataFrame:
    """The host frame from its columns."""
    return _ordered(calls.assign(kind=calls["kind"].astype(HOST_KINDS)), HOST_COLUMNS)


def ranges_frame(ranges: pd.DataFrame) -> pd.DataFrame:
    """The ranges frame from its columns."""
    return _ordered(ranges, RANGE_COLUMNS)


def api_kind(name: str) -> str:
    """Whether an API call waits for the device, gives it work, or neither."""
    if "Synchronize" in name:
        return "synchronize"
    return "launch" if any(part in name for part in ("Launch", "Memcpy", "Memset")) else "other"


def _families(work: pd.DataFrame) -> pd.Series:
    """Family by name, except inside the optimizer's range."""
    by_name = work["name"].map(families.family).astype(object)
    in_optimizer = work["ranges"].map(cache(families.is_optimizer)).astype(bool)
    chosen = by_name.mask(in_optimizer, by_name.map(families.family_in_optimizer))
    return chosen.astype(pd.CategoricalDtype(list(families.FAMILIES)))


def _ordered(frame: pd.DataFrame, columns: Sequence[str]) -> pd.DataFrame:
    if (frame["duration_ns"] < 0).any():
        raise TraceError("something ends before it starts")
    ordered = frame.sort_values("start_ns", kind="stable", ignore_index=True)[list(columns)]
    ordered["name"] = ordered["name"].cat.remove_unused_categories()
    return ordered
