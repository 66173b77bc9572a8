"""Nsight Systems' SQLite export as frames.

Four tables hold what ran on the device: kernels, copies, sets, and CUDA graphs. A graph is one bar
unless the capture asked for its nodes (`--cuda-graph-trace=node`); then its kernels are rows like
others, which share the id of the one call that launched the graph. The bar of a graph whose kernels
are there is left out: it would count their time twice.

Ids of processes and threads are packed: the low 24 bits are the thread, the next 24 the process,
then the machine. Rows are joined by all but the thread, and the frames show the operating system's
plain numbers.

NVTX_EVENTS mixes ranges with marks and names of domains; 59 and 70 are ranges that a thread pushed
and popped, 60 and 71 those that the process started and ended. A range's name is in the row, or in
the strings' table when it was registered. Ranges that PyTorch makes for each operator carry a
counter and shapes; these are cut off, so that equal operators have equal names.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np

from lmlab.measure.trace.attribution import (
    NO_CORRELATION,
    STILL_OPEN,
    Calls,
    Ranges,
    Work,
    assemble,
    joint_keys,
)
from lmlab.measure.trace.frames import Coded, Integers, Trace
from lmlab.measure.trace.nsys_export import Export, opened

KERNELS = "CUPTI_ACTIVITY_KIND_KERNEL"
COPIES = "CUPTI_ACTIVITY_KIND_MEMCPY"
SETS = "CUPTI_ACTIVITY_KIND_MEMSET"
GRAPHS = "CUPTI_ACTIVITY_KIND_GRAPH_TRACE"
CALLS = "CUPTI_ACTIVITY_KIND_RUNTIME"
RANGES = "NVTX_EVENTS"

RANGE_EVENTS = (59, 60, 70, 71)
COPY_NAMES = {1: "Memcpy HtoD", 2: "Memcpy DtoH", 8: "Memcpy DtoD", 10: "Memcpy PtoP"}

_CORRELATION = f"COALESCE(correlationId, {NO_CORRELATION})"
_THREAD_BITS = 0xFFFFFF
_OPERATOR_DETAILS = re.compile(r", (?:seq|op_id) = \d+.*", re.DOTALL)
_API_VERSION = re.compile(r"_v\d{4,}$")  # of cudaLaunchKernel_v7000; cuMemAlloc_v2 is a name


def read(path: Path) -> Trace:
    """The frames of an export."""
    with opened(path) as export:
        trace = assemble(_work(export), _calls(export), _ranges(export), f"nsys {export.version}")
    for frame in (trace.kernels, trace.host, trace.ranges):
        frame["process"] = frame["process"] // 2**24 % 2**24
    return trace


def _work(export: Export) -> Work:
    """Kernels, copies, sets, and the graphs of which no kernels are there."""
    kernels = _activities(export, KERNELS, "kernel", "demangledName", export.texts)
    graphs = _activities(export, GRAPHS, "graph", "graphId", _numbered("CUDA graph {}"))
    copies = _activities(export, COPIES, "memcpy", "copyKind", _copy_names)
    sets = _activities(export, SETS, "memset", "0", _numbered("Memset"))
    return Work.stacked([kernels, _without_kernels(graphs, kernels), copies, sets])


def _activities(
    export: Export, table: str, kind: str, key: str, naming: Callable[[Integers], Coded[str]]
) -> Work:
    """What one table says ran on the device; `naming` turns column `key` into names."""
    columns = ("start", "end", "streamId", "deviceId", "COALESCE(globalPid, 0)", _CORRELATION, key)
    start, end, stream, device, process, correlation, keys = export.integers(table, columns)
    return Work(
        names=naming(keys),
        kinds=Coded(np.zeros(len(start), dtype=np.int64), [kind]),
        start_ns=start,
        duration_ns=end - start,
        stream=stream,
        device=device,
        process=process & ~_THREAD_BITS,
        correlation=correlation,
    )


def _numbered(text: str) -> Callable[[Integers], Coded[str]]:
    """Names made from a number."""

    def names(numbers: Integers) -> Coded[str]:
        used, rows = np.unique(numbers, return_inverse=True)
        return Coded.of([text.format(number) for number in used.tolist()]).take(rows)

    return names


def _copy_names(kinds: Integers) -> Coded[str]:
    used, rows = np.unique(kinds, return_inverse=True)
    return Coded.of([COPY_NAMES.get(kind, "Memcpy") for kind in used.tolist()]).take(rows)


def _without_kernels(graphs: Work, kernels: Work) -> Work:
    """The graphs but for those whose launch also has kernels of its own."""
    own, of_kernels = joint_keys(
        (graphs.process, graphs.correlation), (kernels.process, kernels.correlation)
    )
    return graphs.take(np.flatnonzero(~np.isin(own, of_kernels)))


def _calls(export: Export) -> Calls:
    columns = ("start", "end", "COALESCE(globalTid, 0)", _CORRELATION, "nameId")
    start, end, thread, correlation, names = export.integers(CALLS, columns)
    return Calls(
        names=export.texts(names).renamed(lambda name: _API_VERSION.sub("", name)),
        start_ns=start,
        duration_ns=end - start,
        thread=thread & _THREAD_BITS,
        process=thread & ~_THREAD_BITS,
        correlation=correlation,
    )


def _ranges(export: Export) -> Ranges:
    """The rows that are ranges; names are cut as they come, for few of them then stay different."""
    registered = "(SELECT value FROM StringIds WHERE id = textId)"
    name = f"COALESCE(text, {registered}, '')" if export.has("StringIds") else "COALESCE(text, '')"
    columns = f"start, COALESCE(end, {STILL_OPEN}), COALESCE(globalTid, 0), {name}"
    known: dict[str, int] = {}
    pieces = [np.empty((0, 4), dtype=np.int64)]
    for piece in export.rows(RANGES, columns, where=f"eventType IN {RANGE_EVENTS}"):
        coded = [
            (*numbers, known.setdefault(_OPERATOR_DETAILS.sub("", text), len(known)))
            for *numbers, text in piece
        ]
        pieces.append(np.array(coded, dtype=np.int64))
    start, end, thread, names = np.concatenate(pieces).T
    return Ranges(
        names=Coded(names, list(known)),
        start_ns=start,
        end_ns=end,
        thread=thread & _THREAD_BITS,
        process=thread & ~_THREAD_BITS,
    )
