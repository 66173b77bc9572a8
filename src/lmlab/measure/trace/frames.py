"""The frames that every profiler is read into: kernels, host calls, named ranges.

**kernels**, one row for each thing that ran on the device, in order of start:

    name         as the compiler demangled it, whole
    short_name   the same, shortened by rule for print
    family       what it does, see `families`
    kind         kernel, memcpy, memset, op (CPU), graph (whose kernels were not traced)
    start_ns     on the profiler's clock, which host and device share
    duration_ns  on a CPU: the operator's own time, without the operators that it called
    stream       CUDA stream; on a CPU the thread
    device       index of the GPU; CPU for a CPU
    process      operating system's id
    launch_ns    start of the API call that launched it; missing where that was not recorded
    delay_ns     start_ns - launch_ns: how long it lay in the queue, the call itself included
    ranges       names of the ranges that the launch stands in, outermost first, as a tuple

**host**, one row for each API call: name, kind (launch, synchronize, op, other), start_ns,
duration_ns, thread, process, ranges. Calls nest (a runtime call can enter the driver), so
durations of different kinds must not be added. On a CPU its rows are the operators that move no
data (views, allocation, dispatch) with their own time.

**ranges**, one row for each range that was opened: name, start_ns, duration_ns, thread, process.

A kernel belongs to the ranges that were open in its *process* when it was launched. Neither the
device's time nor the launching thread will do: kernels run after the host has moved on, and the
autograd engine launches the backward pass from a thread of its own, on which no range is open.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt
import pandas as pd

from lmlab.measure.trace import families
from lmlab.measure.trace.short_names import shorten

Integers = npt.NDArray[np.int64]
Path = tuple[str, ...]
Value = TypeVar("Value", str, Path)

CPU = -1
"""The device of an operator that ran on a CPU."""

KINDS = ("kernel", "memcpy", "memset", "graph", "op")
HOST_KINDS = ("launch", "synchronize", "op", "other")

KERNEL_COLUMNS = (
    *("name", "short_name", "family", "kind", "start_ns", "duration_ns"),
    *("stream", "device", "process", "launch_ns", "delay_ns", "ranges"),
)
HOST_COLUMNS = ("name", "kind", "start_ns", "duration_ns", "thread", "process", "ranges")
RANGE_COLUMNS = ("name", "start_ns", "duration_ns", "thread", "process")


class TraceError(ValueError):
    """A file that is not the trace it should be."""


@dataclass(frozen=True)
class Trace:
    """What one profiled run did; `tool` names the profiler and its version, for the caption."""

    kernels: pd.DataFrame
    host: pd.DataFrame
    ranges: pd.DataFrame
    tool: str


@dataclass(frozen=True)
class Coded(Generic[Value]):
    """A long column of few distinct values: one code a row, each value once."""

    codes: Integers
    values: Sequence[Value]

    @classmethod
    def of(cls, rows: Sequence[Value]) -> Coded[Value]:
        """Code a column; values stand in the order in which they first appear."""
        known: dict[Value, int] = {}
        codes = [known.setdefault(row, len(known)) for row in rows]
        return cls(np.array(codes, dtype=np.int64), list(known))

    @classmethod
    def stacked(cls, columns: Sequence[Coded[Value]]) -> Coded[Value]:
        """Several columns one below the other."""
        known = cls.of([value for column in columns for value in column.values])
        offsets = np.cumsum([0, *(len(column.values) for column in columns[:-1])])
        shifted = [column.codes + at for column, at in zip(columns, offsets, strict=True)]
        return known.take(np.concatenate(shifted))

    def take(self, rows: Integers) -> Coded[Value]:
        """The column of these rows."""
        return Coded(self.codes[rows], self.values)

    def renamed(self, change: Callable[[Value], Value]) -> Coded[Value]:
        """The column with every value changed; values that become equal become one."""
        return Coded.of([change(value) for value in self.values]).take(self.codes)

    def categorical(self) -> pd.Categorical:
        """As pandas keeps such a column, without the values that no row has."""
        used = np.unique(self.codes)
        renumbered = np.searchsorted(used, self.codes)
        return pd.Categorical.from_codes(renumbered, pd.Index([self.values[code] for code in used]))

    def objects(self) -> npt.NDArray[np.object_]:
        """One reference a row to its value; rows of equal value share one object."""
        lookup = np.empty(len(self.values), dtype=object)
        lookup[:] = self.values
        return lookup[self.codes]


def mapped(column: Coded[str], values: Sequence[str], categories: Sequence[str]) -> pd.Categorical:
    """A categorical of fixed categories that gives each value of `column` the one of `values`."""
    dtype = pd.CategoricalDtype(list(categories))
    by_value = dtype.categories.get_indexer(pd.Index(list(values), dtype=object))
    return pd.Categorical.from_codes(by_value[column.codes], dtype=dtype)


def kernels_frame(
    *,
    names: Coded[str],
    kinds: Coded[str],
    start_ns: Integers,
    duration_ns: Integers,
    stream: Integers,
    device: Integers,
    process: Integers,
    launch_ns: Integers,
    launch_known: npt.NDArray[np.bool_],
    paths: Coded[Path],
) -> pd.DataFrame:
    """The kernels frame from its columns; families and short names are found here."""
    columns = {
        "name": names.categorical(),
        "short_name": names.renamed(shorten).categorical(),
        "family": _families(names, paths),
        "kind": mapped(kinds, kinds.values, KINDS),
        "start_ns": start_ns,
        "duration_ns": duration_ns,
        "stream": stream,
        "device": device,
        "process": process,
        "launch_ns": pd.arrays.IntegerArray(launch_ns, ~launch_known),
        "delay_ns": pd.arrays.IntegerArray(start_ns - launch_ns, ~launch_known),
        "ranges": paths.objects(),
    }
    return _in_order(columns, KERNEL_COLUMNS)


def host_frame(
    *,
    names: Coded[str],
    kinds: Sequence[str],
    start_ns: Integers,
    duration_ns: Integers,
    thread: Integers,
    process: Integers,
    paths: Coded[Path],
) -> pd.DataFrame:
    """The host frame from its columns; `kinds` has one entry for each distinct name."""
    columns = {
        "name": names.categorical(),
        "kind": mapped(names, kinds, HOST_KINDS),
        "start_ns": start_ns,
        "duration_ns": duration_ns,
        "thread": thread,
        "process": process,
        "ranges": paths.objects(),
    }
    return _in_order(columns, HOST_COLUMNS)


def ranges_frame(
    *,
    names: Coded[str],
    start_ns: Integers,
    duration_ns: Integers,
    thread: Integers,
    process: Integers,
) -> pd.DataFrame:
    """The ranges frame from its columns."""
    columns = {
        "name": names.categorical(),
        "start_ns": start_ns,
        "duration_ns": duration_ns,
        "thread": thread,
        "process": process,
    }
    return _in_order(columns, RANGE_COLUMNS)


def api_kind(name: str) -> str:
    """What an API call of this name does to the device: wait for it, give it work, or neither."""
    if "Synchronize" in name:
        return "synchronize"
    return "launch" if any(word in name for word in ("Launch", "Memcpy", "Memset")) else "other"


def _families(names: Coded[str], paths: Coded[Path]) -> pd.Categorical:
    """Family by name, except where the ranges say that this is the optimizer at work."""
    plain = [families.family(name) for name in names.values]
    within = [families.family_in_optimizer(family) for family in plain]
    in_optimizer = np.array([families.is_optimizer(path) for path in paths.values], dtype=bool)
    # Twice as many values as names: those outside the optimizer, then those inside.
    inside = in_optimizer[paths.codes] if len(paths.values) else np.zeros(len(paths.codes), bool)
    codes = names.codes + len(plain) * inside
    return mapped(Coded(codes, plain + within), plain + within, families.FAMILIES)


def _in_order(columns: dict[str, Any], order: Sequence[str]) -> pd.DataFrame:
    """The frame in order of start, with columns where the documentation has them."""
    frame = pd.DataFrame(columns, columns=list(order))
    return frame.sort_values("start_ns", kind="stable", ignore_index=True)
