"""Builds small SQLite exports as Nsight Systems writes them: a table appears with its first row."""

import sqlite3
from pathlib import Path
from typing import Any, Self

MACHINE = 1 << 48  # the part of a global id that identifies the machine
_ACTIVITY = "start, end, deviceId, streamId, correlationId, globalPid"
TABLES = {
    "StringIds": "id INTEGER PRIMARY KEY, value TEXT",
    "CUPTI_ACTIVITY_KIND_KERNEL": f"{_ACTIVITY}, demangledName INTEGER, graphNodeId",
    "CUPTI_ACTIVITY_KIND_MEMCPY": f"{_ACTIVITY}, copyKind INTEGER",
    "CUPTI_ACTIVITY_KIND_MEMSET": _ACTIVITY,
    "CUPTI_ACTIVITY_KIND_GRAPH_TRACE": f"{_ACTIVITY}, graphId INTEGER, graphExecId INTEGER",
    "CUPTI_ACTIVITY_KIND_RUNTIME": "start, end, globalTid, correlationId, nameId",
    "NVTX_EVENTS": "start, end, eventType, text, textId, globalTid",
    "META_DATA_EXPORT": "name TEXT, value TEXT",
}


class ExportBuilder:
    """An export under construction; `with` closes the file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._database = sqlite3.connect(path, isolation_level=None)  # rows are there at once
        self.execute("PRAGMA journal_mode = OFF")
        self.execute("PRAGMA synchronous = OFF")
        self._strings: dict[str | bytes, int] = {}
        self._insert("META_DATA_EXPORT", name="EXPORT_SCHEMA_VERSION", value="3.20.2")
        self._insert("META_DATA_EXPORT", name="EXPORT_PRODUCT_VERSION", value="2025.3.1.90")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._database.close()

    def execute(self, statement: str) -> None:
        self._database.execute(statement)

    def table(self, name: str) -> None:
        self.execute(f"CREATE TABLE IF NOT EXISTS {name} ({TABLES[name]})")

    def string(self, text: str | bytes) -> int:
        if text not in self._strings:
            self._strings[text] = len(self._strings) + 1
            self._insert("StringIds", id=self._strings[text], value=text)
        return self._strings[text]

    def call(self, name: str, start: int, end: int, correlation: int, **other: int) -> None:
        row = {"start": start, "end": end, "globalTid": thread_id(**other)}
        row |= {"correlationId": correlation, "nameId": self.string(name)}
        self._insert("CUPTI_ACTIVITY_KIND_RUNTIME", **row)

    def kernel(self, name: str, start: int, end: int, correlation: int, **other: int) -> None:
        self._ran("KERNEL", start, end, correlation, demangledName=self.string(name), **other)

    def launched(self, name: str, at: int, start: int, end: int, correlation: int) -> None:
        """A kernel and the call that launched it."""
        self.call("cudaLaunchKernel_v7000", at, at + 1, correlation)
        self.kernel(name, start, end, correlation)

    def memcpy(self, kind: int, start: int, end: int, correlation: int, **other: int) -> None:
        self._ran("MEMCPY", start, end, correlation, copyKind=kind, **other)

    def memset(self, start: int, end: int, correlation: int, **other: int) -> None:
        self._ran("MEMSET", start, end, correlation, **other)

    def graph(self, graph: int, start: int, end: int, correlation: int, **other: int) -> None:
        self._ran("GRAPH_TRACE", start, end, correlation, graphId=graph, graphExecId=graph, **other)

    def range(
        self, name: str, start: int, end: int | None, *, event: int = 59, registered: bool = False,
        **other: int,
    ) -> None:  # fmt: skip
        text = {"textId": self.string(name)} if registered else {"text": name}
        row = {"start": start, "end": end, "eventType": event, "globalTid": thread_id(**other)}
        self._insert("NVTX_EVENTS", **row, **text)

    def _ran(self, table: str, start: int, end: int, correlation: int, **other: int) -> None:
        row = {"deviceId": 0, "streamId": 7, "globalPid": thread_id(other.pop("process", 1), 0)}
        times = {"start": start, "end": end, "correlationId": correlation}
        self._insert(f"CUPTI_ACTIVITY_KIND_{table}", **row, **times, **other)

    def _insert(self, table: str, **row: Any) -> None:
        self.table(table)
        columns, marks = ", ".join(row), ", ".join("?" * len(row))
        self._database.execute(f"INSERT INTO {table} ({columns}) VALUES ({marks})", [*row.values()])


def thread_id(process: int = 1, thread: int = 1) -> int:
    """A thread's global id; thread 0 is the process's own."""
    return MACHINE + (process << 24) + thread
