"""The PyTorch profiler's trace (Chrome's JSON format) as frames.

Events carry a category: `kernel`, `gpu_memcpy` and `gpu_memset` ran on the device, `cuda_runtime`
and `cuda_driver` are API calls, `user_annotation` are ranges (`record_function`), `cpu_op` are
operators. Everything else is ignored, including `gpu_user_annotation`, which draws the same ranges
again over the kernels. A kernel and its launch share `args.correlation`.

On a device event `pid` is the GPU and `tid` the stream; the process is that of the API calls, of
which a trace has one. Times are microseconds with three decimals: whole nanoseconds.
"""

from __future__ import annotations

import gzip
import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from lmlab.measure.trace import cpu_ops
from lmlab.measure.trace.attribution import NO_CORRELATION, assemble, closed_ranges, paths_at
from lmlab.measure.trace.frames import CPU, Trace, TraceError, host_frame, kernels_frame, names

Event = dict[str, Any]

_DEVICE_KINDS = {"kernel": "kernel", "gpu_memcpy": "memcpy", "gpu_memset": "memset"}
_API_CATEGORIES = ("cuda_runtime", "cuda_driver")
_MALFORMED = (AttributeError, KeyError, TypeError, ValueError, OverflowError, RecursionError)
_UNREADABLE = (OSError, EOFError, zlib.error)


def read(path: Path, *, on_cpu: bool, tool: str = "torch profiler") -> Trace:
    """The frames of a trace; with `on_cpu` its operators take the place of kernels."""
    if not path.is_file():
        raise TraceError(f"trace: {path} does not exist")
    try:
        return _trace(_load(path), on_cpu, tool)
    except (*_UNREADABLE, *_MALFORMED) as error:
        found = f"{type(error).__name__}: {error}".splitlines()[0]
        raise TraceError(f"trace: {path} is not a profiler's JSON trace: {found}") from None


def _trace(events: list[Event], on_cpu: bool, tool: str) -> Trace:
    ranges = _host_side(events, "user_annotation")
    ranges["end_ns"] = ranges["start_ns"] + ranges["duration_ns"]
    calls = _host_side(events, *(["cpu_op"] if on_cpu else _API_CATEGORIES))
    if on_cpu:
        return _cpu_trace(calls, ranges, tool)
    process = calls["process"].iloc[0] if len(calls) else 0
    return assemble(_device_side(events).assign(process=process), calls, ranges, tool)


def _load(path: Path) -> list[Event]:
    """The events with a duration in a trace file, which may be gzipped."""
    data = path.read_bytes()
    document = json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)
    return [event for event in document["traceEvents"] if event.get("ph") == "X"]


def _host_side(events: list[Event], *categories: str) -> pd.DataFrame:
    """Calls, operators or ranges of threads."""
    chosen = [event for event in events if event.get("cat") in categories]
    return _frame(
        chosen,
        thread=[int(event["tid"]) for event in chosen],
        process=[int(event["pid"]) for event in chosen],
        correlation=_argument(chosen, "correlation"),
    )


def _device_side(events: list[Event]) -> pd.DataFrame:
    """Kernels, copies and memsets; the process is added later."""
    chosen = [event for event in events if event.get("cat") in _DEVICE_KINDS]
    columns = {name: _argument(chosen, name) for name in ("stream", "device", "correlation")}
    return _frame(chosen, **columns).assign(kind=[_DEVICE_KINDS[event["cat"]] for event in chosen])


def _frame(events: list[Event], **columns: list[int]) -> pd.DataFrame:
    """Names, times in nanoseconds, and further columns of integers."""
    times = {"start_ns": "ts", "duration_ns": "dur"}
    columns |= {name: [round(event[key] * 1000) for event in events] for name, key in times.items()}
    numbers = {name: np.array(column, dtype=np.int64) for name, column in columns.items()}
    return pd.DataFrame(numbers).assign(name=names(str(event["name"]) for event in events))


def _argument(events: list[Event], key: str) -> list[int]:
    return [event.get("args", {}).get(key, NO_CORRELATION) for event in events]


def _cpu_trace(operators: pd.DataFrame, ranges: pd.DataFrame, tool: str) -> Trace:
    """Operators that work as kernels, the others as host calls, both with their self time."""
    start = operators["start_ns"].to_numpy()
    duration = operators["duration_ns"].to_numpy()
    callers = cpu_ops.callers(operators["thread"].to_numpy(), start, duration)
    works = cpu_ops.does_work(operators["name"], callers)
    operators = operators.assign(
        duration_ns=cpu_ops.self_times(duration, callers),
        kind="op",
        stream=operators["thread"],
        device=CPU,
        launch_ns=start,
        ranges=paths_at(ranges, operators["process"].to_numpy(), start),
    )
    kernels, host = kernels_frame(operators[works]), host_frame(operators[~works])
    return Trace(kernels, host, closed_ranges(ranges, last_ns=0), tool)
