"""Reading an export takes memory in proportion to the numbers in it, not to its rows."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import pytest

from lmlab.measure.trace import nsys, nsys_export
from tests.measure.trace.export_builder import ExportBuilder, thread_id

ROWS = {"CUPTI_ACTIVITY_KIND_RUNTIME": 3_000, "CUPTI_ACTIVITY_KIND_KERNEL": 1_500}
RANGES = 6_000


def build(path: Path) -> None:
    """In the proportions of a train step with operator ranges; launches are 1000 ns apart."""
    thread, process = thread_id(1, 1), thread_id(1, 0)
    operator = "'aten::mul, op_id = ' || i || ', sizes = ' || printf('%.*c', 130, '4')"
    with ExportBuilder(path) as builder:
        builder.range("step", 0, None)
        launch, kernel = builder.string("cudaLaunchKernel_v7000"), builder.string("elementwise")
        columns = {
            "CUPTI_ACTIVITY_KIND_RUNTIME": f"i * 500, i * 500 + 200, {thread}, i, {launch}",
            "CUPTI_ACTIVITY_KIND_KERNEL": "i * 1000 + 600, i * 1000 + 900, 0, 7, i * 2,"
            f" {process}, {kernel}, NULL",
            "NVTX_EVENTS": f"i * 250, i * 250 + 240, 59, {operator}, NULL, {thread}",
        }
        for table, selected in columns.items():
            last = ROWS.get(table, RANGES) - 1
            numbers = f"SELECT 0 UNION ALL SELECT i + 1 FROM n WHERE i < {last}"
            builder.table(table)
            builder.execute(
                f"INSERT INTO {table} WITH RECURSIVE n(i) AS ({numbers}) SELECT {selected} FROM n"
            )


def test_rows_are_not_held_as_python_objects(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nsys_export, "BATCH_ROWS", 200)
    path = tmp_path / "large.sqlite"
    build(path)
    nsys.read(path)  # what is imported on the way does not count
    tracemalloc.start()
    trace = nsys.read(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert [len(trace.host), len(trace.kernels), len(trace.ranges)] == [*ROWS.values(), RANGES + 1]
    assert trace.kernels["ranges"].iloc[-1] == ("step", "aten::mul")
    assert peak < 1.5 * path.stat().st_size, "2.6 if all rows were one batch"
