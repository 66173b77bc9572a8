"""Exports of Nsight Systems as frames: every shape of export that is known to occur."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from lmlab.measure.trace import nsys
from lmlab.measure.trace.frames import HOST_COLUMNS, KERNEL_COLUMNS, RANGE_COLUMNS
from tests.measure.trace.export_builder import ExportBuilder


@pytest.fixture
def builder(tmp_path: Path) -> ExportBuilder:
    return ExportBuilder(tmp_path / "export.sqlite")


def ranges_by_kernel(builder: ExportBuilder) -> dict[str, tuple[str, ...]]:
    """Kernel name to the ranges of its launch, for kernels with distinct names."""
    kernels = nsys.read(builder.path).kernels
    return dict(zip(kernels["name"].astype(str), kernels["ranges"], strict=True))


def test_a_kernel_row_has_all_documented_columns(builder: ExportBuilder) -> None:
    with builder:
        builder.call("cudaLaunchKernel_v7000", 10, 15, correlation=4, process=42)
        builder.range("forward", 0, 100, process=42)
        builder.kernel("void at::native::reduce_kernel<MaxOps<float>>(T3)", 30, 70, 4, process=42)
    trace = nsys.read(builder.path)
    assert tuple(trace.kernels.columns) == KERNEL_COLUMNS
    assert trace.kernels.iloc[0].to_dict() == {
        "name": "void at::native::reduce_kernel<MaxOps<float>>(T3)",
        "short_name": "reduce_kernel<max>",
        "family": "reduction",
        "kind": "kernel",
        "start_ns": 30,
        "duration_ns": 40,
        "stream": 7,
        "device": 0,
        "process": 42,
        "launch_ns": 10,
        "delay_ns": 20,
        "ranges": ("forward",),
    }
    assert trace.tool == "nsys 2025.3.1.90"


def test_a_kernel_belongs_to_the_range_of_its_launch_whatever_the_thread(
    builder: ExportBuilder,
) -> None:
    with builder:
        builder.range("forward", 0, 20)
        builder.range("backward", 20, 40)
        builder.launched("runs late", 19, 30, 35, 1)
        builder.launched("at the edge", 20, 36, 39, 2)
        builder.call("cudaLaunchKernel_v7000", 25, 35, 3, thread=2)  # autograd's thread
        builder.kernel("gemm", 60, 70, 3)
        builder.call("cudaDeviceSynchronize_v3020", 50, 75, 4)
        builder.call("cuMemAlloc_v2", 96, 97, 5)
    assert ranges_by_kernel(builder) == {
        "runs late": ("forward",),
        "at the edge": ("backward",),
        "gemm": ("backward",),
    }
    host = nsys.read(builder.path).host
    assert tuple(host.columns) == HOST_COLUMNS
    assert host[["name", "kind", "duration_ns", "thread", "ranges"]].to_numpy().tolist()[2:] == [
        ["cudaLaunchKernel", "launch", 10, 2, ("backward",)],
        ["cudaDeviceSynchronize", "synchronize", 25, 1, ()],
        ["cuMemAlloc_v2", "other", 1, 1, ()],
    ]


@pytest.mark.parametrize("event", [34, 59, 60, 70, 71, 75])
@pytest.mark.parametrize("registered", [False, True], ids=["text", "textId"])
def test_only_ranges_are_read_from_nvtx(
    builder: ExportBuilder, event: int, registered: bool
) -> None:
    with builder:
        builder.range("forward", -500, 50, event=event, registered=registered)
        builder.launched("k", 10, 20, 30, 1)
    mark, domain = 34, 75
    expected = () if event in (mark, domain) else ("forward",)
    assert ranges_by_kernel(builder) == {"k": expected}
    assert len(nsys.read(builder.path).ranges) == len(expected)


def test_a_range_that_was_never_closed_lasts_until_the_end(builder: ExportBuilder) -> None:
    with builder:
        builder.range("step", 5, None)
        builder.launched("k", 10, 20, 95, 1)
    trace = nsys.read(builder.path)
    assert trace.kernels["ranges"].tolist() == [("step",)]
    assert trace.ranges["duration_ns"].tolist() == [90]


def test_operator_ranges_lose_their_counters(builder: ExportBuilder) -> None:
    with builder:
        builder.range("aten::mul, op_id = 7, sizes = [[4, 12], []]", 0, 9)
        builder.range("MulBackward0, seq = 3, op_id = 8, sizes = [[4]]", 10, 19)
        builder.range("a, b = c", 20, 29)
    names = nsys.read(builder.path).ranges["name"].tolist()
    assert names == ["aten::mul", "MulBackward0", "a, b = c"]


def test_copies_and_memsets_are_rows_of_the_copy_family(builder: ExportBuilder) -> None:
    with builder:
        builder.call("cudaMemcpyAsync_v3020", 1, 2, 1)
        builder.memcpy(1, 10, 20, 1)
        builder.memcpy(99, 20, 30, 2)
        builder.memset(30, 35, 3)
    kernels = nsys.read(builder.path).kernels
    assert kernels[["name", "kind", "family", "duration_ns"]].to_numpy().tolist() == [
        ["Memcpy HtoD", "memcpy", "copy", 10],
        ["Memcpy", "memcpy", "copy", 10],
        ["Memset", "memset", "copy", 5],
    ]
    assert kernels["launch_ns"].isna().tolist() == [False, True, True]


def test_the_kernels_of_a_graph_replace_its_row(builder: ExportBuilder) -> None:
    with builder:
        builder.range("replay", 0, 50)
        builder.call("cudaGraphLaunch_v10000", 10, 12, 1)
        builder.kernel("a", 20, 40, 1, graphNodeId=100)
        builder.kernel("b", 40, 80, 1, graphNodeId=101)
        builder.graph(5, 20, 80, 1)
        builder.call("cudaGraphLaunch_v10000", 13, 14, 2)
        builder.graph(6, 90, 95, 2)
    kernels = nsys.read(builder.path).kernels
    assert kernels[["name", "kind", "family"]].to_numpy().tolist() == [
        ["a", "kernel", "other"],
        ["b", "kernel", "other"],
        ["CUDA graph 6", "graph", "other"],
    ]
    assert set(kernels["ranges"]) == {("replay",)}


LAUNCHES = {
    "of each process": ([("cudaLaunchKernel", 60, 5, 2), ("cudaLaunchKernel", 10, 5, 1)], 10),
    "the runtime call around a driver call": (
        [("cuLaunchKernel", 12, 5, 1), ("cudaLaunchKernel", 10, 5, 1)],
        10,
    ),
    "not recorded": ([("cudaLaunchKernel", 10, 6, 1)], None),
}


@pytest.mark.parametrize(("calls", "launch"), LAUNCHES.values(), ids=LAUNCHES)
def test_a_kernel_is_matched_to_its_launch(
    builder: ExportBuilder, calls: list[tuple[str, int, int, int]], launch: int | None
) -> None:
    with builder:
        builder.range("rank 1", 0, 100)
        builder.range("rank 2", 0, 100, process=2)
        for name, start, correlation, process in calls:
            builder.call(name, start, start + 3, correlation, process=process)
        builder.kernel("k", 80, 90, 5)
    (kernel,) = nsys.read(builder.path).kernels.to_dict("records")
    assert kernel["ranges"] == (() if launch is None else ("rank 1",))
    assert (None if pd.isna(kernel["launch_ns"]) else kernel["launch_ns"]) == launch


def test_only_products_and_collectives_keep_their_family_in_the_optimizer(
    builder: ExportBuilder,
) -> None:
    names = ["elementwise_kernel", "ampere_sgemm_32x32_nn", "ncclDevKernel_AllReduce"]
    with builder:
        builder.range("optimizer step", 0, 90)
        for row, name in enumerate([*names, "elementwise_kernel"]):
            builder.launched(name, 10 + 30 * row, 200 + row, 201 + row, row)
    families = nsys.read(builder.path).kernels["family"].tolist()
    assert families == ["optimizer", "matmul_simt", "communication", "elementwise"]


@pytest.mark.parametrize("tables", [[], ["StringIds", "CUPTI_ACTIVITY_KIND_KERNEL", "NVTX_EVENTS"]])
def test_an_empty_export_gives_empty_frames(builder: ExportBuilder, tables: list[str]) -> None:
    with builder:
        for table in tables:
            builder.table(table)
    trace = nsys.read(builder.path)
    assert (len(trace.kernels), len(trace.host), len(trace.ranges)) == (0, 0, 0)
    assert tuple(trace.kernels.columns) == KERNEL_COLUMNS
    assert tuple(trace.ranges.columns) == RANGE_COLUMNS
    assert str(trace.kernels["launch_ns"].dtype) == "Int64"


@pytest.mark.parametrize(
    ("stored", "shown"), [("CAST(X'6BFF' AS TEXT)", "k\ufffd"), ("12", "12"), ("NULL", None)]
)
def test_names_of_any_type_and_encoding_become_text(
    builder: ExportBuilder, stored: str, shown: str | None
) -> None:
    with builder:
        builder.range("x", 0, 50)
        builder.launched("k", 10, 20, 30, 1)
        builder.execute(f"UPDATE NVTX_EVENTS SET text = {stored}")
        builder.execute(f"UPDATE StringIds SET value = {stored} WHERE value = 'k'")
        builder.execute(f"UPDATE META_DATA_EXPORT SET value = {stored} WHERE name LIKE '%PROD%'")
    assert ranges_by_kernel(builder) == {shown or "string 2": (shown or "",)}
    assert nsys.read(builder.path).tool == f"nsys {shown}"
