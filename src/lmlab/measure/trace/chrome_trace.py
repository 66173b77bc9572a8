"""The PyTorch profiler's trace (Chrome's JSON format) as frames.

Events carry a category: `kernel`, `gpu_memcpy` and `gpu_memset` ran on the device, `cuda_runtime`
and `cuda_driver` are API calls, `user_annotation` are ranges (`record_function`), `cpu_op` are
operators. Everything else is ignored, including `gpu_user_annotation`, which repeats the ranges
over the kernels. A kernel and its launch share `args.correlation`. Times are microseconds with
three decimals: whole nanoseconds.

On a CPU, operators that do work take the place of kernels. Operators call one another (`linear`
calls `matmul` calls `mm`), so each counts with its self time, without the operators it called.
Counting only leaves would be wrong: `mm` and `mean` do work themselves and also call others.
Bookkeeping operators would launch nothing on a GPU, so they go to the host side: views, allocation,
dispatch, composite operators that no family rule matches, and the autograd engine.
"""

import gzip
import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from lmlab.measure.trace.frames import (
    CPU,
    NO_CORRELATION,
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
_HOST_KINDS = {"cuda_runtime": "call", "cuda_driver": "call", "cpu_op": "op"}
_KINDS = {**_DEVICE_KINDS, **_HOST_KINDS, "user_annotation": "range"}
_INTEGERS = ["start_ns", "duration_ns", "thread", "process", "correlation", "device"]
_BOOKKEEPING = re.compile(
    r"aten::(as_strided|_?(unsafe_)?view(_as)?|_?reshape(_alias|_as)?|t|transpose|permute|movedim"
    r"|expand(_as)?|select|slice|narrow|split\w*|chunk|unbind|squeeze|unsqueeze|flatten|unflatten"
    r"|unfold|diagonal|alias|detach|lift_fresh|set|real|m?T|empty\w*|new_empty\w*|resize|resolve_\w+"
    r"|result_type|promote_types|can_cast|to|_to_copy|contiguous|is_\w+|item|_local_scalar_dense"
    r"|_has_compatible_shallow_copy_type|_has_same_storage_numel|linear|matmul|softmax|zeros|ones)_?"
)


def read(path: Path, *, on_cpu: bool, tool: str = "torch profiler") -> Trace:
    """The frames of a trace; with `on_cpu` its operators take the place of kernels."""
    try:
        data = path.read_bytes()
        document = json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)
        complete = (event for event in document["traceEvents"] if event.get("ph") == "X")
        return _trace([event for event in complete if event.get("cat") in _KINDS], on_cpu, tool)
    except Exception as error:  # a file may hold anything
        found = f"{type(error).__name__}: {error}".splitlines()[0]
        raise TraceError(f"trace: {path} is not a profiler's JSON trace: {found}") from None


def _trace(events: list[Event], on_cpu: bool, tool: str) -> Trace:
    numbers = np.array([_integers(event) for event in events], dtype=np.int64)
    frame = pd.DataFrame(numbers.reshape(-1, len(_INTEGERS)), columns=_INTEGERS)
    frame = frame.assign(
        end_ns=frame["start_ns"] + frame["duration_ns"],
        name=names(str(event["name"]) for event in events),
        kind=[_KINDS[event["cat"]] for event in events],
    )
    ranges = frame[frame["kind"] == "range"]
    if on_cpu:
        return _cpu_trace(frame[frame["kind"] == "op"], ranges, tool)
    calls = frame[frame["kind"] == "call"]
    process = calls["process"].iloc[0] if len(calls) else 0  # a trace has one
    work = frame[frame["kind"].isin(_DEVICE_KINDS.values())].assign(process=process)
    return assemble(work, calls, ranges, tool)


def _integers(event: Event) -> tuple[int, ...]:
    arguments = event.get("args", {})
    return (
        round(event["ts"] * 1000),
        round(event["dur"] * 1000),
        int(event["tid"]),
        int(event["pid"]),
        arguments.get("correlation", NO_CORRELATION),
        arguments.get("device", CPU),
    )


def _cpu_trace(operators: pd.DataFrame, ranges: pd.DataFrame, tool: str) -> Trace:
    """The trace of a CPU, each operator with its self time: without the operators it called."""
    columns = ["start_ns", "end_ns", "duration_ns", "thread", "process"]
    start, end, duration, thread, process = operators[columns].to_numpy().T
    own, calls_others = duration.copy(), np.zeros(len(operators), dtype=bool)
    stack: list[int] = []
    for row in np.lexsort((-duration, start, thread)).tolist():
        while stack and (thread[stack[-1]] != thread[row] or end[stack[-1]] <= start[row]):
            stack.pop()
        if stack:
            own[stack[-1]] -= duration[row]
            calls_others[stack[-1]] = True
        stack.append(row)
    works = np.array([*map(does_work, operators["name"], calls_others)], dtype=bool)
    operators = operators.assign(
        duration_ns=np.maximum(own, 0),  # rounding can make children longer than their parent
        device=CPU,
        launch_ns=start,
        ranges=paths_at(ranges, process, start),
    )
    return trace_of(operators[works], operators[~works], ranges, tool)


@cache
def does_work(name: str, calls_others: bool) -> bool:
    """Whether an operator computes or moves data, as a kernel would on a GPU."""
    if "::" not in name or "autograd::" in name or _BOOKKEEPING.fullmatch(name):
        return False
    return not calls_others or family(name) != "other"
