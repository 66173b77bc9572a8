"""Nsight Systems' SQLite export (`nsys export --type sqlite`) as frames.

A table exists only if it has rows, so a missing table means that nothing of the kind was recorded.
What makes a file an export is its META_DATA_EXPORT table with the schema version. Newer versions
add columns; a missing column that is needed is reported by name, whatever the version.

Four tables hold what ran on the device: kernels, copies, memsets and CUDA graphs. A graph is one
row unless the capture asked for its nodes (`--cuda-graph-trace=node`); then its kernels are rows
like any other, with the correlation id of the call that launched the graph, and the graph's own row
is dropped, because it would count their time twice. Process and thread ids are packed: the low 24
bits are the thread, and what is above them identifies the process.

In NVTX_EVENTS, types 59 and 70 are push-pop ranges of a thread, 60 and 71 start-end ranges of the
process. A range's name is in the row or, if it was registered, in the string table. PyTorch's
operator ranges carry a counter and shapes, which are cut off.

Rows are fetched in batches and stored as 64-bit integers: as Python objects, those of a 500 MB
export would take gigabytes. Strings that are not valid UTF-8 are read with replacement characters.
A file from elsewhere may hold anything, a view that recurses forever too: SQLite's work is limited
in proportion to the file, to a hundred times what real exports take.
"""

import re
import sqlite3
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
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

Row = tuple[Any, ...]

RANGE_EVENTS = (59, 60, 70, 71)
THREAD_BITS = 24
COPY_NAMES = {1: "Memcpy HtoD", 2: "Memcpy DtoH", 8: "Memcpy DtoD", 10: "Memcpy PtoP"}
BATCH_ROWS = 50_000
LONGEST_TEXT_BYTES = 2**24
# Real exports take one step of SQLite's machine per eight bytes.
STEPS_PER_BYTE, SPARE_STEPS, STEPS_PER_CHECK = 12, 10**7, 10**5

_OPERATOR_DETAILS = re.compile(r", (?:seq|op_id) = \d+.*", re.DOTALL)
_API_VERSION = re.compile(r"_v\d{4,}$")  # of cudaLaunchKernel_v7000; cuMemAlloc_v2 is a name


class Export:
    """An open export; `version` is that of the nsys that wrote it."""

    def __init__(self, database: sqlite3.Connection) -> None:
        self._database = database
        self._tables = {name for (name,) in database.execute("SELECT name FROM sqlite_master")}
        if "META_DATA_EXPORT" not in self._tables:
            raise TraceError("no table META_DATA_EXPORT")
        about = dict(database.execute("SELECT name, value FROM META_DATA_EXPORT"))
        self.schema = str(about.get("EXPORT_SCHEMA_VERSION", ""))
        if not self.schema.split(".")[0].isdigit():
            raise TraceError(f"EXPORT_SCHEMA_VERSION is {self.schema!r}")
        self.version = str(about.get("EXPORT_PRODUCT_VERSION", "of unknown version"))

    def has(self, table: str) -> bool:
        """Whether the table exists, that is, has rows."""
        return table in self._tables

    def rows(self, table: str, columns: str, where: str = "1") -> Iterator[list[Row]]:
        """A table's rows in batches; none if the table is missing."""
        if not self.has(table):
            return
        try:
            cursor = self._database.execute(f"SELECT {columns} FROM {table} WHERE {where}")
            while batch := cursor.fetchmany(BATCH_ROWS):
                yield batch
        except sqlite3.DatabaseError as error:
            raise TraceError(f"table {table} of schema {self.schema}: {error}") from None

    def integers(
        self,
        table: str,
        columns: Mapping[str, str],
        where: str = "1",
        encode: Callable[[Row], Row] = lambda row: row,
    ) -> pd.DataFrame:
        """A frame of integer columns, each given by an SQL expression; empty without the table."""
        batches = [np.empty((0, len(columns)), dtype=np.int64)]
        for batch in self.rows(table, ", ".join(columns.values()), where):
            try:
                batches.append(np.array([encode(row) for row in batch], dtype=np.int64))
            except (TypeError, ValueError, OverflowError) as error:  # NULL, text, over 64 bits
                raise TraceError(f"table {table}: {error}") from None
        return pd.DataFrame(np.concatenate(batches), columns=list(columns))

    def strings(self, ids: pd.Series) -> pd.Categorical:
        """The strings that a column of string ids refers to."""
        wanted = set(ids)
        found = {
            key: text
            for batch in self.rows("StringIds", "id, CAST(value AS TEXT)")
            for key, text in batch
            if key in wanted and text is not None
        }
        used, rows = np.unique(ids, return_inverse=True)
        return names(found.get(key, f"string {key}") for key in used.tolist()).take(rows)


@contextmanager
def opened(path: Path) -> Iterator[Export]:
    """The export at `path`; anything that cannot be read becomes a one-line TraceError."""
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
        yield Export(database)
    except (sqlite3.DatabaseError, TraceError) as error:
        raise TraceError(
            f"trace: {path} is not a readable SQLite export of Nsight Systems: {error}"
        ) from None
    finally:
        database.close()


def read(path: Path) -> Trace:
    """The frames of an export."""
    with opened(path) as export:
        return assemble(_work(export), _calls(export), _ranges(export), f"nsys {export.version}")


def _work(export: Export) -> pd.DataFrame:
    """Kernels, copies, memsets, and the graphs whose kernels were not traced."""
    kernels = _ran(export, "KERNEL", "kernel", "demangledName")
    kernels["name"] = export.strings(kernels["key"])
    graphs = _ran(export, "GRAPH_TRACE", "graph", "graphId")
    graphs["name"] = [f"CUDA graph {graph}" for graph in graphs["key"]]
    traced = pd.MultiIndex.from_frame(kernels[LAUNCH_KEY])
    graphs = graphs[~pd.MultiIndex.from_frame(graphs[LAUNCH_KEY]).isin(traced)]
    copies = _ran(export, "MEMCPY", "memcpy", "copyKind")
    copies["name"] = copies["key"].map(lambda kind: COPY_NAMES.get(kind, "Memcpy"))
    sets = _ran(export, "MEMSET", "memset", "0").assign(name="Memset")
    work = pd.concat([kernels, graphs, copies, sets], ignore_index=True)
    return work.assign(name=names(work["name"]))


def _ran(export: Export, activity: str, kind: str, key: str) -> pd.DataFrame:
    """What ran on a device; `key` is the column that names are made from."""
    columns = {"device": "deviceId", "key": key}
    return _activities(export, activity, "globalPid", columns).assign(kind=kind)


def _calls(export: Export) -> pd.DataFrame:
    calls = _activities(export, "RUNTIME", "globalTid", {"key": "nameId"})
    plain = pd.Series(export.strings(calls["key"])).map(lambda name: _API_VERSION.sub("", name))
    return calls.assign(name=plain.astype("category"))


def _activities(export: Export, kind: str, owner: str, more: Mapping[str, str]) -> pd.DataFrame:
    """The rows of one activity table, with the process or thread that owns them."""
    columns = {
        "start_ns": "start",
        "duration_ns": "end - start",
        "process": f"COALESCE({owner}, 0) >> {THREAD_BITS}",
        "correlation": f"COALESCE(correlationId, {NO_CORRELATION})",
    }
    return export.integers(f"CUPTI_ACTIVITY_KIND_{kind}", {**columns, **more})


def _ranges(export: Export) -> pd.DataFrame:
    """The NVTX events that are ranges; names are cut while reading, which leaves few of them."""
    registered = "(SELECT value FROM StringIds WHERE id = textId)"
    name = f"COALESCE(text, {registered}, '')" if export.has("StringIds") else "COALESCE(text, '')"
    columns = {
        "start_ns": "start",
        "end_ns": f"COALESCE(end, {STILL_OPEN})",
        "process": f"COALESCE(globalTid, 0) >> {THREAD_BITS}",
        "name": f"CAST({name} AS TEXT)",
    }
    known: dict[str, int] = {}

    def encode(row: Row) -> Row:
        *numbers, text = row
        return *numbers, known.setdefault(_OPERATOR_DETAILS.sub("", text), len(known))

    where = f"eventType IN {RANGE_EVENTS}"
    ranges = export.integers("NVTX_EVENTS", columns, where, encode)
    cut = pd.Index(list(known), dtype=object)
    return ranges.assign(name=pd.Categorical.from_codes(ranges["name"], cut))
