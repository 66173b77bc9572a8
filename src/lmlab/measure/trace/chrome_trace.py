"""PyTorch's profiler's trace (Chrome's JSON format) as frames.

Events carry a category: `kernel`, `gpu_memcpy` and `gpu_memset` ran on the device, `cuda_runtime`
and `cuda_driver` are calls, `user_annotation` are ranges (`record_function`), `cpu_op` operators.
`gpu_user_annotation` are the same ranges drawn once more over the kernels; they are not read, nor
is anything else. A kernel and its call share `args.correlation`.

On a device event `pid` is the GPU and `tid` the stream; the process is that of the calls, and a
trace has one. Times are microseconds with three decimals: whole nanoseconds.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np

from lmlab.measure.trace import cpu_ops
from lmlab.measure.trace.attribution import (
    NO_CORRELATION,
    Calls,
    Ranges,
    Work,
    assemble,
    paths_at,
)
from lmlab.measure.trace.frames import (
    CPU,
    Coded,
    Integers,
    Trace,
    TraceError,
    host_frame,
    kernels_frame,
)

Event = dict[str, Any]

_DEVICE_KINDS = {"kernel": "kernel", "gpu_memcpy": "memcpy", "gpu_memset": "memset"}
_API_CATEGORIES = frozenset({"cuda_runtime", "cuda_driver"})


def read(path: Path, *, on_cpu: bool, tool: str = "torch profiler") -> Trace:
    """The frames of a trace; with `on_cpu` its operators stand for kernels."""
    events = _load(path)
    ranges = _ranges([event for event in events if event.get("cat") == "user_annotation"])
    if on_cpu:
        operators = [event for event in events if event.get("cat") == "cpu_op"]
        return _cpu_trace(operators, ranges, tool)
    calls = _calls([event for event in events if event.get("cat") in _API_CATEGORIES])
    work = [event for event in events if event.get("cat") in _DEVICE_KINDS]
    return assemble(_work(work, process=_process(calls)), calls, ranges, tool)


def _load(path: Path) -> list[Event]:
    """The events with a duration of a trace file, which may be gzipped."""
    try:
        data = path.read_bytes()
        document = json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)
    except FileNotFoundError:
        raise TraceError(f"trace: {path} does not exist") from None
    except (OSError, ValueError) as error:
        raise TraceError(f"trace: {path} is not a profiler's JSON trace: {error}") from None
    if not isinstance(document, dict) or not isinstance(document.get("traceEvents"), list):
        raise TraceError(f"trace: {path} is JSON, but not a profiler's trace: no traceEvents")
    return [event for event in document["traceEvents"] if event.get("ph") == "X"]


def _process(calls: Calls) -> int:
    """The process of a trace; any number where nothing was called."""
    return int(calls.process[0]) if len(calls.process) else 0


def _work(events: list[Event], process: int) -> Work:
    return Work(
        names=_names(events),
        kinds=Coded.of([_DEVICE_KINDS[event["cat"]] for event in events]),
        start_ns=_nanoseconds(events, "ts"),
        duration_ns=_nanoseconds(events, "dur"),
        stream=_argument(events, "stream"),
        device=_argument(events, "device"),
        process=np.full(len(events), process, dtype=np.int64),
        correlation=_argument(events, "correlation"),
    )


def _calls(events: list[Event]) -> Calls:
    return Calls(
        names=_names(events),
        start_ns=_nanoseconds(events, "ts"),
        duration_ns=_nanoseconds(events, "dur"),
        thread=_integers(events, "tid"),
        process=_integers(events, "pid"),
        correlation=_argument(events, "correlation"),
    )


def _ranges(events: list[Event]) -> Ranges:
    start = _nanoseconds(events, "ts")
    return Ranges(
        names=_names(events),
        start_ns=start,
        end_ns=start + _nanoseconds(events, "dur"),
        thread=_integers(events, "tid"),
        process=_integers(events, "pid"),
    )


def _cpu_trace(operators: list[Event], ranges: Ranges, tool: str) -> Trace:
    names = _names(operators)
    start, duration = _nanoseconds(operators, "ts"), _nanoseconds(operators, "dur")
    thread, process = _integers(operators, "tid"), _integers(operators, "pid")
    callers = cpu_ops.callers(thread, start, duration)
    own = cpu_ops.own_times(duration, callers)
    works = cpu_ops.does_work(names, callers)
    paths = paths_at(ranges, process, start)
    at_work, arranging = np.flatnonzero(works), np.flatnonzero(~works)
    kernels = kernels_frame(
        names=names.take(at_work),
        kinds=Coded(np.zeros(len(at_work), dtype=np.int64), ["op"]),
        start_ns=start[at_work],
        duration_ns=own[at_work],
        stream=thread[at_work],
        device=np.full(len(at_work), CPU, dtype=np.int64),
        process=process[at_work],
        launch_ns=start[at_work],
        launch_known=np.ones(len(at_work), dtype=bool),
        paths=paths.take(at_work),
    )
    host = host_frame(
        names=names.take(arranging),
        kinds=["op"] * len(names.values),
        start_ns=start[arranging],
        duration_ns=own[arranging],
        thread=thread[arranging],
        process=process[arranging],
        paths=paths.take(arranging),
    )
    return Trace(kernels, host, ranges.frame(last_ns=0), tool)


def _names(events: list[Event]) -> Coded[str]:
    return Coded.of([event["name"] for event in events])


def _nanoseconds(events: list[Event], field: str) -> Integers:
    """A field in microseconds as whole nanoseconds."""
    return np.array([round(event[field] * 1000) for event in events], dtype=np.int64)


def _integers(events: list[Event], field: str) -> Integers:
    return np.array([int(event[field]) for event in events], dtype=np.int64)


def _argument(events: list[Event], field: str) -> Integers:
    """A number among an event's arguments, NO_CORRELATION where it is not there."""
    values = [event.get("args", {}).get(field, NO_CORRELATION) for event in events]
    return np.array(values, dtype=np.int64)
