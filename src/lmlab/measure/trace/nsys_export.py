"""Reading the SQLite database that `nsys export --type sqlite` writes.

A table exists only if it has rows, so a missing table means that nothing of the kind was recorded,
and a report without kernels is still a report. What makes a file an export is its META_DATA_EXPORT
table with the schema version. Newer versions add columns; a missing column that is needed is
reported by name, whatever the version.

Rows are fetched in batches and stored as 64-bit integers: as Python objects, the rows of a 500 MB
export would take gigabytes. Strings that are not valid UTF-8 (a kernel or range may be named
anything, and exports from Windows have such metadata) are read with replacement characters.

A file from elsewhere may hold anything, a view that recurses forever too: SQLite's work is limited
in proportion to the file, to a hundred times what real exports take.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import pandas as pd

from lmlab.measure.trace.frames import TraceError, names

Row = tuple[Any, ...]

BATCH_ROWS = 50_000
LONGEST_TEXT_BYTES = 2**24
# Real exports take one step of SQLite's machine per eight bytes.
STEPS_PER_BYTE, SPARE_STEPS, STEPS_PER_CHECK = 12, 10**7, 10**5


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
