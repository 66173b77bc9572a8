"""Nsight Systems' SQLite export (`nsys export --type sqlite`) as frames.

A table exists only if it has rows, so a missing table means that nothing of the kind was recorded.
A file is an export if it has a META_DATA_EXPORT table. Newer versions add columns; a missing
required column is reported by name, whatever the version.

Four tables hold device activity: kernels, copies, memsets and CUDA graphs. A graph is one row
unless the capture asked for its nodes (`--cuda-graph-trace=node`); then its kernels are rows like
any other, with the correlation id of the call that launched the graph, and the graph's own row is
dropped, because it would count their time twice. Process and thread ids are packed: the low 24 bits
are the thread, the bits above identify the process.

In NVTX_EVENTS, types 59 and 70 are push-pop ranges of a thread, 60 and 71 start-end ranges of the
process. A range's name is in the row or, if it was registered, in the string table. PyTorch's
operator ranges carry a counter and shapes, which are cut off.

Rows are fetched in batches and stored as 64-bit integers, with names as codes: as Python objects,
the rows of a 500 MB export would take gigabytes. Invalid UTF-8 is read with replacement characters.
An untrusted file may contain anything, even a view that recurses forever, so SQLite's work is
limited in proportion to the file size, to about forty times what real exports take.
"""

import re
import sqlite3
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import pandas as pd

from lmlab.measure.trace.frames import (
    LAUNCH_KEY,
    NO_CORRELATION,
    STILL_OPEN,
    Trace,
    TraceError,
    assemble,
    names,
)

RANGE_EVENTS = (59, 60, 70, 71)
THREAD_BITS = 24
COPY_NAME = (
    "'Memcpy' || CASE copyKind WHEN 1 THEN ' HtoD' WHEN 2 THEN ' DtoH' WHEN 8 THEN ' DtoD' "
    "WHEN 10 THEN ' PtoP' ELSE '' END"
)
BATCH_ROWS = 50_000
LONGEST_TEXT_BYTES = 2**24
# Real exports take at most one step of SQLite's virtual machine per three bytes.
STEPS_PER_BYTE, SPARE_STEPS, STEPS_PER_CHECK = 12, 10**7, 10**5

_OPERATOR_DETAILS = re.compile(r", (?:seq|op_id) = \d+.*", re.DOTALL)
_API_VERSION = re.compile(r"_v\d{4,}$")  # as in cudaLaunchKernel_v7000, not cuMemAlloc_v2


def read(path: Path) -> Trace:
    """The frames of an export; anything that cannot be read becomes a one-line TraceError."""
    if not path.is_file():
        raise TraceError(f"trace: {path} does not exist")
    # Immutable: no lock or journal in a directory that may be read-only or remote.
    database = sqlite3.connect(f"file:{quote(str(path))}?mode=ro&immutable=1", uri=True)
    database.text_factory = lambda raw: raw.decode("utf-8", errors="replace")
    database.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, LONGEST_TEXT_BYTES)
    checks = (SPARE_STEPS + STEPS_PER_BYTE * path.stat().st_size) // STEPS_PER_CHECK
    remaining = iter(range(checks))
    database.set_progress_handler(lambda: next(remaining, None) is None, STEPS_PER_CHECK)
    try:
        export = Export(database)
        return assemble(_work(export), _calls(export), _ranges(export), f"nsys {export.version}")
    except (sqlite3.DatabaseError, TraceError) as error:
        raise TraceError(
            f"trace: {path} is not a readable SQLite export of Nsight Systems: {error}"
        ) from None
    finally:
        database.close()


class Export:
    """An open export; `version` is that of the nsys that wrote it."""

    def __init__(self, database: sqlite3.Connection) -> None:
        self._database = database
        self._tables = {name for (name,) in database.execute("SELECT name FROM sqlite_master")}
        about = dict(database.execute("SELECT name, value FROM META_DATA_EXPORT"))
        self._schema = about.get("EXPORT_SCHEMA_VERSION")
        self.version = str(about.get("EXPORT_PRODUCT_VERSION", "of unknown version"))

    def string(self, key: str) -> str:
        """SQL for the string whose id is in the column `key`."""
        found = f"(SELECT value FROM StringIds WHERE id = {key})"
        return f"COALESCE({found if 'StringIds' in self._tables else 'NULL'}, 'string ' || {key})"

    def frame(
        self,
        table: str,
        columns: Mapping[str, str],
        name: str,
        cut: re.Pattern[str] | None = None,
        where: str = "1",
    ) -> pd.DataFrame:
        """Integer columns and names, each given by an SQL expression; empty without the table.
        Text that `cut` matches is removed while reading, which keeps distinct names few."""
        codes: dict[str, int] = {}

        def encode(row: tuple[Any, ...]) -> tuple[int, ...]:
            *numbers, text = row
            return *numbers, codes.setdefault(cut.sub("", text) if cut else text, len(codes))

        expressions = ", ".join([*columns.values(), f"CAST(COALESCE({name}, '') AS TEXT)"])
        batches = [np.empty((0, len(columns) + 1), dtype=np.int64)]
        try:
            if table in self._tables:
                cursor = self._database.execute(f"SELECT {expressions} FROM {table} WHERE {where}")
                while batch := cursor.fetchmany(BATCH_ROWS):
                    batches.append(np.array([encode(row) for row in batch], dtype=np.int64))
        except (sqlite3.DatabaseError, TypeError, ValueError, OverflowError) as error:
            # A missing column; NULL, text or more than 64 bits in place of an integer.
            raise TraceError(f"table {table} of schema {self._schema}: {error}") from None
        frame = pd.DataFrame(np.concatenate(batches), columns=[*columns, "name"])
        distinct = pd.Index(list(codes), dtype=object)
        return frame.assign(name=pd.Categorical.from_codes(frame["name"], distinct))


def _work(export: Export) -> pd.DataFrame:
    """Kernels, copies, memsets, and the graphs whose kernels were not traced."""
    kernels = _ran(export, "KERNEL", "kernel", export.string("demangledName"))
    graphs = _ran(export, "GRAPH_TRACE", "graph", "'CUDA graph ' || graphId")
    traced = pd.MultiIndex.from_frame(kernels[LAUNCH_KEY])
    graphs = graphs[~pd.MultiIndex.from_frame(graphs[LAUNCH_KEY]).isin(traced)]
    copies = _ran(export, "MEMCPY", "memcpy", COPY_NAME)
    sets = _ran(export, "MEMSET", "memset", "'Memset'")
    work = pd.concat([kernels, graphs, copies, sets], ignore_index=True)
    return work.assign(name=names(work["name"]))


def _ran(export: Export, activity: str, kind: str, name: str) -> pd.DataFrame:
    """Device activities of one kind."""
    columns = {"device": "deviceId", **_columns("globalPid")}
    return export.frame(f"CUPTI_ACTIVITY_KIND_{activity}", columns, name).assign(kind=kind)


def _calls(export: Export) -> pd.DataFrame:
    name = export.string("nameId")
    return export.frame("CUPTI_ACTIVITY_KIND_RUNTIME", _columns("globalTid"), name, _API_VERSION)


def _columns(owner: str) -> dict[str, str]:
    """Columns of an activity; `owner` is the column with its process or thread id."""
    return {
        "start_ns": "start",
        "duration_ns": "end - start",
        "process": f"COALESCE({owner}, 0) >> {THREAD_BITS}",
        "correlation": f"COALESCE(correlationId, {NO_CORRELATION})",
    }


def _ranges(export: Export) -> pd.DataFrame:
    """The NVTX events that are ranges."""
    columns = {
        "start_ns": "start",
        "end_ns": f"COALESCE(end, {STILL_OPEN})",
        "process": f"COALESCE(globalTid, 0) >> {THREAD_BITS}",
    }
    name = f"COALESCE(text, {export.string('textId')})"
    where = f"eventType IN {RANGE_EVENTS}"
    return export.frame("NVTX_EVENTS", columns, name, _OPERATOR_DETAILS, where)
