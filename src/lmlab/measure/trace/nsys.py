"""Nsight Systems' SQLite export as frames.

Four tables hold what ran on the device: kernels, copies, memsets and CUDA graphs. A graph is one
row unless the capture asked for its nodes (`--cuda-graph-trace=node`); then its kernels are rows
like any other and share the correlation id of the call that launched the graph. The row of a graph
whose kernels were traced is dropped, because it would count their time twice.

Process and thread ids are packed: the low 24 bits are the thread, the next 24 the process, then the
machine. Rows are joined on everything but the thread; the frames show plain process ids.

NVTX_EVENTS mixes ranges with marks and domain names; event types 59 and 70 are push-pop ranges of a
thread, 60 and 71 start-end ranges of the process. A range's name is in the row or, if it was
registered, in the string table. PyTorch's operator ranges carry a counter and shapes; these are cut
off so that equal operators have equal names.
"""

from __future__ import annotations

import re
from pathlib import Path

import pandas as pd

from lmlab.measure.trace.attribution import LAUNCH_KEY, NO_CORRELATION, STILL_OPEN, assemble
from lmlab.measure.trace.frames import Trace, names
from lmlab.measure.trace.nsys_export import Export, Row, opened

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


def _work(export: Export) -> pd.DataFrame:
    """Kernels, copies, memsets, and the graphs whose kernels were not traced."""
    kernels = _activities(export, KERNELS, "kernel", "demangledName")
    kernels["name"] = export.strings(kernels["key"])
    graphs = _activities(export, GRAPHS, "graph", "graphId")
    graphs["name"] = [f"CUDA graph {graph}" for graph in graphs["key"]]
    traced = pd.MultiIndex.from_frame(kernels[LAUNCH_KEY])
    graphs = graphs[~pd.MultiIndex.from_frame(graphs[LAUNCH_KEY]).isin(traced)]
    copies = _activities(export, COPIES, "memcpy", "copyKind")
    copies["name"] = copies["key"].map(lambda kind: COPY_NAMES.get(kind, "Memcpy"))
    sets = _activities(export, SETS, "memset", "0").assign(name="Memset")
    work = pd.concat([kernels, graphs, copies, sets], ignore_index=True)
    return work.assign(name=names(work["name"]))


def _activities(export: Export, table: str, kind: str, key: str) -> pd.DataFrame:
    """The rows of one device activity table; `key` is the column that names are made from."""
    columns = {
        "start_ns": "start",
        "end_ns": "end",
        "stream": "streamId",
        "device": "deviceId",
        "process": "COALESCE(globalPid, 0)",
        "correlation": _CORRELATION,
        "key": key,
    }
    rows = export.integers(table, columns)
    return rows.assign(
        kind=kind,
        duration_ns=rows["end_ns"] - rows["start_ns"],
        process=rows["process"] & ~_THREAD_BITS,
    )


def _calls(export: Export) -> pd.DataFrame:
    columns = {
        "start_ns": "start",
        "end_ns": "end",
        "thread": "COALESCE(globalTid, 0)",
        "correlation": _CORRELATION,
        "key": "nameId",
    }
    calls = _by_thread(export.integers(CALLS, columns))
    plain = pd.Series(export.strings(calls["key"])).map(lambda name: _API_VERSION.sub("", name))
    return calls.assign(
        name=plain.astype("category"), duration_ns=calls["end_ns"] - calls["start_ns"]
    )


def _ranges(export: Export) -> pd.DataFrame:
    """The NVTX events that are ranges; names are cut while reading, which leaves few of them."""
    registered = "(SELECT value FROM StringIds WHERE id = textId)"
    name = f"COALESCE(text, {registered}, '')" if export.has("StringIds") else "COALESCE(text, '')"
    columns = {
        "start_ns": "start",
        "end_ns": f"COALESCE(end, {STILL_OPEN})",
        "thread": "COALESCE(globalTid, 0)",
        "name": f"CAST({name} AS TEXT)",
    }
    known: dict[str, int] = {}

    def encode(row: Row) -> Row:
        *numbers, text = row
        return *numbers, known.setdefault(_OPERATOR_DETAILS.sub("", text), len(known))

    where = f"eventType IN {RANGE_EVENTS}"
    ranges = _by_thread(export.integers(RANGES, columns, where, encode))
    cut = pd.Index(list(known), dtype=object)
    return ranges.assign(name=pd.Categorical.from_codes(ranges["name"], cut))


def _by_thread(rows: pd.DataFrame) -> pd.DataFrame:
    """Splits the packed thread id into thread and process."""
    return rows.assign(thread=rows["thread"] & _THREAD_BITS, process=rows["thread"] & ~_THREAD_BITS)
