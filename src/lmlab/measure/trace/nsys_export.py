"""An SQLite export of Nsight Systems as a database: opened, checked, read in pieces.

`nsys export --type sqlite` creates a table only when it has a row for it, so a missing table means
that nothing of the kind was recorded, and a report without any kernel is still a report. What makes
a file an export is its META_DATA_EXPORT table with the schema's version. Versions differ by columns
being added; a column that is needed and missing is reported by name, whatever the version.

Rows come in pieces of a fixed number and are kept as plain 64 bit integers: as Python objects, the
rows of a 500 MB export would take gigabytes.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np

from lmlab.measure.trace.frames import Coded, Integers, TraceError

ROWS_AT_ONCE = 50_000


class Export:
    """An open export; `version` is that of the nsys that wrote it."""

    def __init__(self, database: sqlite3.Connection, path: Path) -> None:
        self._database = database
        self._path = path
        self._tables = {name for (name,) in database.execute("SELECT name FROM sqlite_master")}
        if "META_DATA_EXPORT" not in self._tables:
            raise TraceError(_not_an_export(path, "it has no table META_DATA_EXPORT"))
        about = dict(database.execute("SELECT name, value FROM META_DATA_EXPORT"))
        self.schema = str(about.get("EXPORT_SCHEMA_VERSION", ""))
        if not self.schema.split(".")[0].isdigit():
            found = f"its EXPORT_SCHEMA_VERSION is {self.schema!r}"
            raise TraceError(_not_an_export(path, found))
        self.version = str(about.get("EXPORT_PRODUCT_VERSION", "of unknown version"))

    def has(self, table: str) -> bool:
        """Whether anything was recorded that this table holds."""
        return table in self._tables

    def rows(self, table: str, columns: str, where: str = "1") -> Iterator[list[tuple[Any, ...]]]:
        """A table's rows in pieces; none where the table is missing."""
        if not self.has(table):
            return
        try:
            cursor = self._database.execute(f"SELECT {columns} FROM {table} WHERE {where}")
        except sqlite3.OperationalError as error:
            text = f"trace: {self._path}: table {table} of schema {self.schema}: {error}"
            raise TraceError(text) from None
        while piece := cursor.fetchmany(ROWS_AT_ONCE):
            yield piece

    def integers(self, table: str, columns: Iterable[str]) -> list[Integers]:
        """A table's columns, or expressions over them, as integers; empty ones if it is missing."""
        columns = list(columns)
        pieces = [
            np.array(piece, dtype=np.int64).T for piece in self.rows(table, ", ".join(columns))
        ]
        return list(np.concatenate([np.empty((len(columns), 0), dtype=np.int64), *pieces], axis=1))

    def texts(self, ids: Integers) -> Coded[str]:
        """The strings that a column of string ids stands for; equal strings get one code."""
        used, rows = np.unique(ids, return_inverse=True)
        wanted = set(used.tolist())
        found = {
            key: text
            for piece in self.rows("StringIds", "id, value")
            for key, text in piece
            if key in wanted
        }
        values = Coded.of([found.get(key, f"string {key}") for key in used.tolist()])
        return values.take(rows)


@contextmanager
def opened(path: Path) -> Iterator[Export]:
    """The export at `path`; whatever SQLite cannot read becomes one clear line."""
    if not path.is_file():
        raise TraceError(f"trace: {path} does not exist")
    # Immutable: no lock and no journal are asked of a folder that may be read-only or remote.
    database = sqlite3.connect(f"file:{quote(str(path))}?mode=ro&immutable=1", uri=True)
    try:
        yield Export(database, path)
    except sqlite3.DatabaseError as error:
        raise TraceError(_not_an_export(path, str(error))) from None
    finally:
        database.close()


def _not_an_export(path: Path, found: str) -> str:
    return f"trace: {path} is not an SQLite export of Nsight Systems: {found}"
