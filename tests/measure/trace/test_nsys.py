"""Exports of Nsight Systems as frames: every shape of export that is known to occur."""

import tracemalloc
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmlab.measure.trace import frames, nsys
from lmlab.measure.trace.frames import KERNEL_COLUMNS, RANGE_COLUMNS, names, paths_at
from tests.measure.trace.export_builder import ExportBuilder


def rows(frame: pd.DataFrame, *columns: str) -> list[list[Any]]:
    """These columns as lists, with None for what is missing."""
    found: list[list[Any]] = frame[list(columns)].astype(object).to_numpy().tolist()
    return [[None if value is pd.NA else value for value in row] for row in found]


def test_a_kernel_row_has_all_documented_columns(builder: ExportBuilder) -> None:
    name = "void at::native::reduce_kernel<MaxOps<float>>(T3)"
    builder.call("cudaLaunchKernel_v7000", 10, 15, correlation=4, process=42)
    builder.range("forward", 0, 100, process=42)
    builder.kernel(name, 30, 70, 4, process=42)
    trace = nsys.read(builder.path)
    assert trace.tool == "nsys 2025.3.1.90"
    assert trace.kernels.to_dict("records") == [
        {
            **{"name": name, "family": "reduction", "kind": "kernel", "device": 0},
            **{"start_ns": 30, "duration_ns": 40, "launch_ns": 10, "delay_ns": 20},
            "ranges": ("forward",),
        }
    ]


def test_a_kernel_belongs_to_the_range_of_its_launch(builder: ExportBuilder) -> None:
    builder.range("forward", 0, 20)
    builder.range("backward", 20, 40)
    builder.launched("runs late", 19, 30, 35, 1)
    builder.launched("at the edge", 20, 36, 39, 2)
    builder.call("cudaLaunchKernel_v7000", 25, 35, 3, thread=2)  # autograd's thread
    builder.kernel("gemm", 60, 70, 3)
    builder.call("cudaDeviceSynchronize_v3020", 50, 75, 4)
    builder.call("cuMemAlloc_v2", 96, 97, 5)
    trace = nsys.read(builder.path)
    assert rows(trace.kernels, "name", "ranges") == [
        ["runs late", ("forward",)],
        ["at the edge", ("backward",)],
        ["gemm", ("backward",)],
    ]
    assert tuple(trace.host.columns) == frames.HOST_COLUMNS
    assert rows(trace.host, "name", "kind", "duration_ns", "ranges")[2:] == [
        ["cudaLaunchKernel", "launch", 10, ("backward",)],
        ["cudaDeviceSynchronize", "synchronize", 25, ()],
        ["cuMemAlloc_v2", "other", 1, ()],
    ]


LAUNCHES = {
    "of each process": ([("cudaLaunchKernel", 60, 5, 2), ("cudaLaunchKernel", 10, 5, 1)], 10),
    "the outer call": ([("cuLaunchKernel", 12, 5, 1), ("cudaLaunchKernel", 10, 5, 1)], 10),
    "not recorded": ([("cudaLaunchKernel", 10, 6, 1)], None),
}


@pytest.mark.parametrize(("calls", "launch"), LAUNCHES.values(), ids=LAUNCHES)
def test_a_kernel_is_matched_to_its_launch(
    builder: ExportBuilder, calls: list[tuple[str, int, int, int]], launch: int | None
) -> None:
    builder.range("rank 1", 0, 100)
    builder.range("rank 2", 0, 100, process=2)
    for name, start, correlation, process in calls:
        builder.call(name, start, start + 3, correlation, process=process)
    builder.kernel("k", 80, 90, 5)
    expected = [launch, () if launch is None else ("rank 1",)]
    assert rows(nsys.read(builder.path).kernels, "launch_ns", "ranges") == [expected]


@pytest.mark.parametrize("event", [34, 59, 60, 70, 71, 75])  # 34 is a mark, 75 a domain's name
@pytest.mark.parametrize("registered", [False, True], ids=["text", "textId"])
def test_only_ranges_are_read(builder: ExportBuilder, event: int, registered: bool) -> None:
    builder.range("forward", -500, 50, event=event, registered=registered)
    builder.launched("k", 10, 20, 30, 1)
    expected = [] if event in (34, 75) else [["forward"]]
    assert rows(nsys.read(builder.path).ranges, "name") == expected


def test_ranges_may_stay_open_and_lose_pytorchs_counters(builder: ExportBuilder) -> None:
    builder.range("step", 5, None)
    builder.range("aten::mul, op_id = 7, sizes = [[4, 12], []]", 10, 19)
    builder.range("MulBackward0, seq = 3, op_id = 8, sizes = [[4]]", 20, 29)
    builder.range("a, b = c", 30, 39)
    builder.launched("k", 10, 20, 95, 1)
    trace = nsys.read(builder.path)
    assert rows(trace.kernels, "ranges") == [[("step", "aten::mul")]]
    expected = [["step", 90], ["aten::mul", 9], ["MulBackward0", 9], ["a, b = c", 9]]
    assert rows(trace.ranges, "name", "duration_ns") == expected


def test_copies_memsets_and_graphs_are_rows(builder: ExportBuilder) -> None:
    builder.range("replay", 0, 50)
    builder.call("cudaMemcpyAsync_v3020", 1, 2, 1)
    builder.memcpy(1, 10, 20, 1)
    builder.memcpy(99, 20, 30, 8)
    builder.memset(30, 35, 9)
    builder.call("cudaGraphLaunch_v10000", 10, 12, 2)
    builder.kernel("a", 40, 50, 2, graphNodeId=100)
    builder.graph(5, 40, 80, 2)  # its kernel was traced and replaces it
    builder.call("cudaGraphLaunch_v10000", 13, 14, 3)
    builder.graph(6, 90, 95, 3)
    kernels = nsys.read(builder.path).kernels
    assert rows(kernels, "name", "kind", "family", "duration_ns", "launch_ns") == [
        ["Memcpy HtoD", "memcpy", "copy", 10, 1],
        ["Memcpy", "memcpy", "copy", 10, None],
        ["Memset", "memset", "copy", 5, None],
        ["a", "kernel", "other", 10, 10],
        ["CUDA graph 6", "graph", "other", 5, 13],
    ]


def test_products_keep_their_family_in_the_optimizer(builder: ExportBuilder) -> None:
    names = ["elementwise_kernel", "ampere_sgemm_32x32_nn", "ncclDevKernel_AllReduce"]
    builder.range("optimizer step", 0, 90)
    for row, name in enumerate([*names, "elementwise_kernel"]):
        builder.launched(name, 10 + 30 * row, 200 + row, 201 + row, row)
    families = nsys.read(builder.path).kernels["family"].tolist()
    assert families == ["optimizer", "matmul_simt", "communication", "elementwise"]


@pytest.mark.parametrize("tables", [[], ["StringIds", "CUPTI_ACTIVITY_KIND_KERNEL", "NVTX_EVENTS"]])
def test_an_empty_export_gives_empty_frames(builder: ExportBuilder, tables: list[str]) -> None:
    for table in tables:
        builder.table(table)
    trace = nsys.read(builder.path)
    assert (len(trace.kernels), len(trace.host), len(trace.ranges)) == (0, 0, 0)
    assert tuple(trace.kernels.columns) == KERNEL_COLUMNS
    assert tuple(trace.ranges.columns) == RANGE_COLUMNS


@pytest.mark.parametrize(
    ("stored", "shown"), [("CAST(X'6BFF' AS TEXT)", "k\ufffd"), ("12", "12"), ("NULL", None)]
)
def test_names_of_any_type_are_text(builder: ExportBuilder, stored: str, shown: str | None) -> None:
    builder.range("x", 0, 50)
    builder.launched("k", 10, 20, 30, 1)
    builder.execute(f"UPDATE NVTX_EVENTS SET text = {stored}")
    builder.execute(f"UPDATE StringIds SET value = {stored} WHERE value = 'k'")
    builder.execute(f"UPDATE META_DATA_EXPORT SET value = {stored} WHERE name LIKE '%PROD%'")
    trace = nsys.read(builder.path)
    assert rows(trace.kernels, "name", "ranges") == [[shown or "string 2", (shown or "",)]]
    assert trace.tool == f"nsys {shown}"


SPANS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 15), st.integers(1, 2)), max_size=25)
MOMENTS = st.lists(st.tuples(st.integers(-2, 60), st.integers(1, 3)), min_size=1, max_size=40)


@settings(max_examples=50)
@given(SPANS, MOMENTS)
def test_paths_at_a_time(spans: list[tuple[int, int, int]], moments: list[tuple[int, int]]) -> None:
    ranges = pd.DataFrame(spans, columns=["start_ns", "length", "process"], dtype="int64")
    ranges = ranges.assign(
        name=names(f"range {row}" for row in range(len(spans))),
        end_ns=ranges["start_ns"] + ranges["length"],
    )
    outermost_first = sorted(range(len(spans)), key=lambda row: (spans[row][0], -spans[row][1]))
    expected = [
        tuple(
            f"range {row}"
            for row in outermost_first
            if spans[row][2] == process and spans[row][0] <= time < spans[row][0] + spans[row][1]
        )
        for time, process in moments
    ]
    times, processes = np.array(moments, dtype=np.int64).T
    assert list(paths_at(ranges, processes, times)) == expected


def test_rows_are_read_in_batches(builder: ExportBuilder, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the proportions of a train step with operator ranges."""
    steps = 1500
    builder.range("step", 0, None)
    for start in range(0, 1000 * steps, 1000):
        builder.launched("elementwise", start, start + 600, start + 900, start)
        builder.call("cudaEventRecord", start + 500, start + 700, start + 1)
        for operator in range(start, start + 1000, 250):
            details = f"aten::mul, op_id = {operator}, sizes = {'4' * 130}"
            builder.range(details, operator, operator + 240)
    monkeypatch.setattr(nsys, "BATCH_ROWS", 200)
    nsys.read(builder.path)  # what is imported on the way does not count
    tracemalloc.start()
    trace = nsys.read(builder.path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    counts = [len(trace.host), len(trace.kernels), len(trace.ranges)]
    assert counts == [2 * steps, steps, 4 * steps + 1]
    assert trace.kernels["ranges"].iloc[-1] == ("step", "aten::mul")
    assert peak < 1.5 * builder.path.stat().st_size, "2.6 if all rows were one batch"
