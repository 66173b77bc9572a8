"""Trace files from elsewhere: whatever they hold, reading ends in frames or in one line."""

import copy
import gzip
import json
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lmlab.measure.trace import chrome_trace, nsys
from lmlab.measure.trace.frames import MAX_DEPTH, TraceError
from tests.measure.trace.export_builder import TABLES, ExportBuilder
from tests.measure.trace.test_chrome_trace import TRAIN_STEP

LINE = r"^trace: \S+ [^\n]+$"
DRAWN = settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])

KERNELS = "CUPTI_ACTIVITY_KIND_KERNEL"
FOREVER = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n)"
EXPORTS = {
    "ends before it starts": f"UPDATE {KERNELS} SET end = start - 1",
    "duration beyond 64 bits": f"UPDATE {KERNELS} SET start = -9e18, end = 9e18",
    "missing column": f"ALTER TABLE {KERNELS} DROP COLUMN deviceId",
    "no metadata": "DROP TABLE META_DATA_EXPORT",
    "recursive view": f"DROP TABLE {KERNELS}; CREATE VIEW {KERNELS} AS {FOREVER} SELECT i start, "
    "i end, 0 deviceId, 0 streamId, 1 correlationId, 0 globalPid, 1 demangledName FROM n",
    "recursive metadata": "DROP TABLE META_DATA_EXPORT; "
    f"CREATE VIEW META_DATA_EXPORT AS {FOREVER} SELECT count(*) name, 0 value FROM n",
    "endless text": "UPDATE NVTX_EVENTS SET text = CAST(zeroblob(50000000) AS TEXT)",
    "too many open ranges": "INSERT INTO NVTX_EVENTS WITH RECURSIVE n(i) AS (SELECT 0 UNION ALL "
    f"SELECT i + 1 FROM n WHERE i < {MAX_DEPTH}) SELECT 0, 99, 59, 'deeper', NULL, globalTid "
    "FROM n, (SELECT globalTid FROM CUPTI_ACTIVITY_KIND_RUNTIME LIMIT 1)",
}


def reason(read: Callable[[], object]) -> str:
    """Why a file was refused; empty if it was read."""
    try:
        read()
    except TraceError as error:
        return str(error)
    return ""


def write_export(path: Path, *statements: str) -> Path:
    """A kernel in a range, changed by statements."""
    path.unlink(missing_ok=True)
    with ExportBuilder(path) as builder:
        builder.range("forward", 0, 100)
        builder.launched("k", 10, 20, 30, 1)
        builder.memcpy(1, 40, 50, 2)
        builder.memset(50, 55, 2)
        builder.graph(1, 60, 70, 3)
        for statement in statements:
            builder.execute(statement)
    return path


@pytest.mark.parametrize("statements", EXPORTS.values(), ids=EXPORTS)
def test_a_malformed_export_is_one_line(tmp_path: Path, statements: str) -> None:
    path = write_export(tmp_path / "e.sqlite", *statements.split("; "))
    with pytest.raises(TraceError, match=LINE):
        nsys.read(path)


COLUMNS = [
    (table, column.split()[0])
    for table, declared in TABLES.items()
    for column in declared.split(", ")
    if "PRIMARY KEY" not in column
]
SQL_VALUES = ["NULL", "'x'", "X'00FF'", "9e999", "1e300", "-1", "1.5", "CAST(X'6BFF' AS TEXT)"]
SQL_VALUES += [str(2**63 - 1), str(-(2**63))]


@DRAWN
@given(st.sampled_from(COLUMNS), st.sampled_from(SQL_VALUES))
def test_any_value_in_any_column(tmp_path: Path, column: tuple[str, str], value: str) -> None:
    table, name = column
    change = f"UPDATE {table} SET {name} = {value}"
    path = write_export(tmp_path / "e.sqlite", change)
    assert "\n" not in reason(lambda: nsys.read(path))


KERNEL = next(event for event in TRAIN_STEP if event["cat"] == "kernel")
WHOLE = json.dumps({"traceEvents": TRAIN_STEP})
DOCUMENTS: dict[str, Any] = {
    "text": "not json",
    "truncated": WHOLE[:300],
    "truncated gzip": gzip.compress(WHOLE.encode())[:-20],
    "deeply nested": "[" * 100_000,
    "no list of events": {"traceEvents": 5},
    "a number of 5000 digits": f'{{"traceEvents": [{{"ph": "X", "ts": {"9" * 5000}}}]}}',
    "ends before it starts": {"traceEvents": [KERNEL | {"dur": -5}]},
}


def write_trace(path: Path, document: Any) -> Path:
    text = document if isinstance(document, str | bytes) else json.dumps(document)
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


@pytest.mark.parametrize("document", DOCUMENTS.values(), ids=DOCUMENTS)
def test_a_malformed_json_trace_is_one_line(tmp_path: Path, document: Any) -> None:
    packed = isinstance(document, bytes) and document[:2] == b"\x1f\x8b"
    path = write_trace(tmp_path / ("t.json.gz" if packed else "t.json"), document)
    with pytest.raises(TraceError, match=LINE):
        chrome_trace.read(path, on_cpu=False)


FIELDS = ("ph", "cat", "name", "pid", "tid", "args", "ts", "dur")
JSON = st.one_of(
    st.none(), st.booleans(), st.floats(), st.integers(), st.text(), st.just([1]), st.just({"a": 1})
)


@DRAWN
@given(st.sampled_from(range(len(TRAIN_STEP))), st.sampled_from(FIELDS), JSON, st.booleans())
def test_any_field_value(tmp_path: Path, row: int, field: str, value: Any, on_cpu: bool) -> None:
    events = copy.deepcopy(TRAIN_STEP)
    events[row][field] = value
    path = write_trace(tmp_path / "t.json", {"traceEvents": events})
    assert "\n" not in reason(lambda: chrome_trace.read(path, on_cpu=on_cpu))


@pytest.mark.parametrize("content", [None, b"not a database" * 100, "truncated", "another"])
def test_a_file_that_is_no_export_is_one_line(tmp_path: Path, content: bytes | str | None) -> None:
    path = tmp_path / "e.sqlite"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content == "another":
        with sqlite3.connect(path) as database:
            database.execute("CREATE TABLE people (name TEXT)")
        database.close()
    elif content == "truncated":
        whole = write_export(path, *(f"CREATE TABLE t{n} (a)" for n in range(40))).read_bytes()
        path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(TraceError, match=LINE):
        nsys.read(path)
    with pytest.raises(TraceError, match=LINE):
        chrome_trace.read(path, on_cpu=False)
