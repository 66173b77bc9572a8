"""Reading a 100 MB export takes less than 400 MB of memory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.measure.trace.export_builder import ExportBuilder, thread_id

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="needs /proc"),
]

ROWS = (240_000, 120_000, 480_000)  # calls, kernels, ranges
SIZE_BYTES = 100_000_000

READ = """
import sys
from pathlib import Path
from lmlab.measure.trace import nsys

def peak_bytes():
    line = next(l for l in open("/proc/self/status") if l.startswith("VmHWM"))
    return int(line.split()[1]) * 1024

before = peak_bytes()
trace = nsys.read(Path(sys.argv[1]))
assert trace.kernels["ranges"].iloc[-1] == ("step", "aten::mul"), trace.kernels["ranges"].iloc[-1]
print(len(trace.kernels), len(trace.host), len(trace.ranges), peak_bytes() - before)
"""


def build(path: Path) -> None:
    """In the proportions of a train step with operator ranges; launches are 1000 ns apart."""
    thread, process = thread_id(1, 1), thread_id(1, 0)
    operator = "'aten::mul, op_id = ' || i || ', sizes = ' || printf('%.*c', 130, '4')"
    with ExportBuilder(path) as builder:
        builder.range("step", 0, None)
        launch, kernel = builder.string("cudaLaunchKernel_v7000"), builder.string("elementwise")
        tables = {
            "CUPTI_ACTIVITY_KIND_RUNTIME": f"i * 500, i * 500 + 200, {thread}, i, {launch}",
            "CUPTI_ACTIVITY_KIND_KERNEL": "i * 1000 + 600, i * 1000 + 900, 0, 7, i * 2,"
            f" {process}, {kernel}, NULL",
            "NVTX_EVENTS": f"i * 250, i * 250 + 240, 59, {operator}, NULL, {thread}",
        }
        for (table, columns), rows in zip(tables.items(), ROWS, strict=True):
            builder.table(table)
            numbers = f"SELECT 0 UNION ALL SELECT i + 1 FROM n WHERE i < {rows - 1}"
            builder.execute(
                f"INSERT INTO {table} WITH RECURSIVE n(i) AS ({numbers}) SELECT {columns} FROM n"
            )


def test_memory_grows_by_less_than_four_times_the_file(tmp_path: Path) -> None:
    path = tmp_path / "large.sqlite"
    build(path)
    assert path.stat().st_size > SIZE_BYTES
    reading = subprocess.run(
        [sys.executable, "-c", READ, str(path)], capture_output=True, text=True, check=True
    )
    kernels, calls, ranges, growth = map(int, reading.stdout.split())
    assert (calls, kernels, ranges) == (ROWS[0], ROWS[1], ROWS[2] + 1)
    assert growth < 4 * SIZE_BYTES
