"""Reading a 100 MB export takes less than 400 MB (and 500 MB less than 2 GB)."""

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

KERNELS = 120_000
CALLS_PER_KERNEL = 2
RANGES_PER_KERNEL = 4
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
print(len(trace.kernels), len(trace.host), len(trace.ranges), before, peak_bytes() - before)
"""


def numbers(count: int) -> str:
    return f"WITH RECURSIVE n(i) AS (SELECT 0 UNION ALL SELECT i + 1 FROM n WHERE i < {count - 1})"


def build(path: Path) -> None:
    """In the proportions of a train step with operator ranges; launches are 1000 ns apart."""
    thread, process = thread_id(1, 1), thread_id(1, 0)
    with ExportBuilder(path) as builder:
        builder.range("step", 0, None)
        launch, kernel = builder.string("cudaLaunchKernel_v7000"), builder.string("elementwise")
        for table in ("CUPTI_ACTIVITY_KIND_RUNTIME", "CUPTI_ACTIVITY_KIND_KERNEL"):
            builder.table(table)
        builder.execute(
            "INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME "
            f"{numbers(KERNELS * CALLS_PER_KERNEL)} SELECT i * 500, i * 500 + 200, {thread}, i,"
            f" {launch} FROM n"
        )
        builder.execute(
            "INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL "
            f"{numbers(KERNELS)} SELECT i * 1000 + 600, i * 1000 + 900, 0, 7, i * 2, {process},"
            f" {kernel}, NULL FROM n"
        )
        operator = "'aten::mul, op_id = ' || i || ', sizes = ' || printf('%.*c', 130, '4')"
        builder.execute(
            "INSERT INTO NVTX_EVENTS "
            f"{numbers(KERNELS * RANGES_PER_KERNEL)} SELECT i * 250, i * 250 + 240, 59, {operator},"
            f" NULL, {thread} FROM n"
        )


def test_memory_grows_by_less_than_four_times_the_file(tmp_path: Path) -> None:
    path = tmp_path / "large.sqlite"
    build(path)
    assert path.stat().st_size > SIZE_BYTES
    reading = subprocess.run(
        [sys.executable, "-c", READ, str(path)], capture_output=True, text=True, check=True
    )
    kernels, calls, ranges, before, growth = map(int, reading.stdout.split())
    assert (kernels, calls) == (KERNELS, KERNELS * CALLS_PER_KERNEL)
    assert ranges == KERNELS * RANGES_PER_KERNEL + 1
    assert before + 5 * growth < 2_000_000_000
