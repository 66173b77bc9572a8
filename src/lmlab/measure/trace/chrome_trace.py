"""The PyTorch profiler's trace (Chrome's JSON format) as frames.

Events carry a category: `kernel`, `gpu_memcpy` and `gpu_memset` ran on the device, `cuda_runtime`
and `cuda_driver` are API calls, `user_annotation` are ranges (`record_function`), `cpu_op` are
operators. Everything else is ignored, including `gpu_user_annotation`, which draws the same ranges
again over the kernels. A kernel and its launch share `args.correlation`. Times are microseconds
with three decimals: whole nanoseconds.

On a CPU, operators that do work take the place of kernels. Operators call one another (`linear`
calls `matmul` calls `mm`), so each counts with its self time, without the operators it called.
Taking only the leaves would be wrong: `mm` and `mean` do their work and also call others. Operators
that only do bookkeeping would launch nothing on a GPU, so they go to the host side: views,
allocation, dispatch, composite operators that no family rule matches, and the autograd engine.
"""

import gzip
import json
import re
import zlib
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from lmlab.measure.trace.frames import (
    CPU,
    NO_CORRELATION,
    Integers,
    Trace,
    TraceError,
    assemble,
    names,
    paths_at,
    trace_of,
)
from lmlab.measure.trace.kernel_names import family

Event = dict[str, Any]

_DEVICE_KINDS = {"kernel": "kernel", "gpu_memcpy": "memcpy", "gpu_memset": "memset"}
_API_CATEGORIES = ("cuda_runtime", "cuda_driver")
_UNREADABLE = (OSError, EOFError, zlib.error)
_MALFORMED = (AttributeError, KeyError, TypeError, ValueError, OverflowError, RecursionError)
_BOOKKEEPING = re.compile(
    r"aten::(as_strided|_?(unsafe_)?view(_as)?|_?reshape(_alias|_as)?|t|transpose|permute|movedim"
    r"|expand(_as)?|select|slice|narrow|split\w*|chunk|unbind|squeeze|unsqueeze|flatten|unflatten"
    r"|unfold|diagonal|alias|detach|lift_fresh|set|real|m?T|empty\w*|new_empty\w*|resize|resolve_\w+"
    r"|result_type|promote_types|can_cast|to|_to_copy|contiguous|is_\w+|item|_local_scalar_dense"
    r"|_has_compatible_shallow_copy_type|_has_same_storage_numel|linear|matmul|softmax|zeros|ones)_?"
)


def read(path: Path, *, on_cpu: bool, tool: str = "torch profiler") -> Trace:
    """The frames of a trace; with `on_cpu` its operators take the place of kernels."""
    if not path.is_file():
        raise TraceError(f"trace: {path} does not exist")
    try:
        data = path.read_bytes()
        document = json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)
        events = [event for event in document["traceEvents"] if event.get("ph") == "X"]
        return _trace(events, on_cpu, tool)
    except (*_UNREADABLE, *_MALFORMED) as error:
        found = f"{type(error).__name__}: {error}".splitlines()[0]
        raise TraceError(f"trace: {path} is not a profiler's JSON trace: {found}") from None


def _trace(events: list[Event], on_cpu: bool, tool: str) -> Trace:
    ranges = _rows(events, "user_annotation")
    ranges["end_ns"] = ranges["start_ns"] + ranges["duration_ns"]
    if on_cpu:
        return _cpu_trace(_rows(events, "cpu_op"), ranges, tool)
    calls, work = _rows(events, *_API_CATEGORIES), _rows(events, *_DEVICE_KINDS)
    process = calls["process"].iloc[0] if len(calls) else 0  # a trace has one
    return assemble(work.assign(process=process), calls, ranges, tool)


def _rows(events: list[Event], *categories: str) -> pd.DataFrame:
    """The events of some categories; columns that they do not have are -1."""
    chosen = [event for event in events if event.get("cat") in categories]
    arguments = [event.get("args", {}) for event in chosen]
    columns = {
        "start_ns": [round(event["ts"] * 1000) for event in chosen],
        "duration_ns": [round(event["dur"] * 1000) for event in chosen],
        "thread": [int(event["tid"]) for event in chosen],
        "process": [int(event["pid"]) for event in chosen],
        **{
            key: [each.get(key, NO_CORRELATION) for each in arguments]
            for key in ("correlation", "device")
        },
    }
    numbers = {name: np.array(column, dtype=np.int64) for name, column in columns.items()}
    return pd.DataFrame(numbers).assign(
        name=names(str(event["name"]) for event in chosen),
        kind=[_DEVICE_KINDS.get(event["cat"], "op") for event in chosen],
    )


def _cpu_trace(operators: pd.DataFrame, ranges: pd.DataFrame, tool: str) -> Trace:
    """Each operator with its duration minus that of the operators it called."""
    start, duration = (operators[key].to_numpy() for key in ("start_ns", "duration_ns"))
    parents = callers(operators["thread"].to_numpy(), start, duration)
    in_children = np.zeros_like(duration)
    np.add.at(in_children, parents[parents >= 0], duration[parents >= 0])
    call_others = np.isin(np.arange(len(parents)), parents)
    works = np.array([*map(does_work, operators["name"], call_others)], dtype=bool)
    operators = operators.assign(
        # Rounding can make children longer than their parent.
        duration_ns=np.maximum(duration - in_children, 0),
        device=CPU,
        launch_ns=start,
        ranges=paths_at(ranges, operators["process"].to_numpy(), start),
    )
    return trace_of(operators[works], operators[~works], ranges, tool)


def callers(thread: Integers, start_ns: Integers, duration_ns: Integers) -> Integers:
    """Row of the operator that directly called each one; -1 if no operator did."""
    parents = np.full(len(start_ns), -1, dtype=np.int64)
    end_ns = start_ns + duration_ns
    stack: list[int] = []
    for row in np.lexsort((-duration_ns, start_ns, thread)).tolist():
        while stack and (thread[stack[-1]] != thread[row] or end_ns[stack[-1]] <= start_ns[row]):
            stack.pop()
        if stack:
            parents[row] = stack[-1]
        stack.append(row)
    return parents


@cache
def does_work(name: str, calls_others: bool) -> bool:
    """Whether an operator computes or moves data, as a kernel would on a GPU."""
    if "::" not in name or "autograd::" in name or _BOOKKEEPING.fullmatch(name):
        return False
    return not calls_others or family(name) != "other"
