"""Exports of Nsight Systems as frames: every shape of export that is known to occur."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pandas as pd
import pytest

from lmlab.measure.trace import nsys
from lmlab.measure.trace.frames import HOST_COLUMNS, KERNEL_COLUMNS, RANGE_COLUMNS, TraceError
from tests.measure.trace.export_builder import ExportBuilder


@pytest.fixture
def builder(tmp_path: Path) -> ExportBuilder:
    return ExportBuilder(tmp_path / "export.sqlite")


def ranges_by_kernel(builder: ExportBuilder) -> dict[str, tuple[str, ...]]:
    """Kernel name to the ranges of its launch, for kernels of different names."""
    kernels = nsys.read(builder.path).kernels
    return dict(zip(kernels["name"].astype(str), kernels["ranges"], strict=True))


def test_a_kernel_has_the_columns_that_the_frame_promises(builder: ExportBuilder) -> None:
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


def test_host_calls_say_whether_they_launch_or_wait(builder: ExportBuilder) -> None:
    with builder:
        builder.range("backward", 0, 50)
        builder.call("cudaLaunchKernel_v7000", 10, 15, 1)
        builder.call("cudaDeviceSynchronize_v3020", 60, 95, 2, thread=3)
        builder.call("cuMemAlloc_v2", 96, 97, 3)
    host = nsys.read(builder.path).host
    assert tuple(host.columns) == HOST_COLUMNS
    assert host[["name", "kind", "duration_ns", "thread", "ranges"]].to_numpy().tolist() == [
        ["cudaLaunchKernel", "launch", 5, 1, ("backward",)],
        ["cudaDeviceSynchronize", "synchronize", 35, 3, ()],
        ["cuMemAlloc_v2", "other", 1, 1, ()],
    ]


def test_backward_kernels_belong_to_the_range_of_another_thread(builder: ExportBuilder) -> None:
    with builder:
        builder.range("backward", 0, 100, thread=1)
        builder.call("cudaLaunchKernel", 50, 55, 1, thread=2)
        builder.kernel("gemm", 60, 70, 1)
    assert ranges_by_kernel(builder) == {"gemm": ("backward",)}


def test_a_kernel_belongs_where_it_was_launched_not_where_it_ran(builder: ExportBuilder) -> None:
    with builder:
        builder.range("forward", 0, 20)
        builder.range("backward", 20, 40)
        builder.call("cudaLaunchKernel", 19, 25, 1)
        builder.kernel("late", 30, 35, 1)
        builder.call("cudaLaunchKernel", 20, 25, 2)
        builder.kernel("edge", 36, 39, 2)
    assert ranges_by_kernel(builder) == {"late": ("forward",), "edge": ("backward",)}


def test_colliding_correlation_ids_stay_within_their_process(builder: ExportBuilder) -> None:
    with builder:
        for process, offset in ((1, 0), (2, 1000)):
            builder.range(f"rank {process}", offset, offset + 100, process=process)
            builder.call("cudaLaunchKernel", offset + 10, offset + 12, 5, process=process)
            builder.kernel(f"kernel {process}", offset + 20, offset + 30, 5, process=process)
    kernels = nsys.read(builder.path).kernels
    assert kernels["launch_ns"].tolist() == [10, 1010]
    assert kernels["ranges"].tolist() == [("rank 1",), ("rank 2",)]


def test_ranges_of_another_process_do_not_count(builder: ExportBuilder) -> None:
    with builder:
        builder.range("other rank", 0, 100, process=2)
        builder.call("cudaLaunchKernel", 10, 12, 1, process=1)
        builder.kernel("k", 20, 30, 1, process=1)
    assert ranges_by_kernel(builder) == {"k": ()}


def test_ranges_are_listed_outermost_first(builder: ExportBuilder) -> None:
    with builder:
        builder.range("softmax", 12, 20)
        builder.range("layers.0", 5, 90)
        builder.range("forward", 5, 100)  # opened together, open for longer
        builder.range("scores", 6, 10)
        builder.call("cudaLaunchKernel", 15, 16, 1)
        builder.kernel("k", 30, 40, 1)
    assert ranges_by_kernel(builder) == {"k": ("forward", "layers.0", "softmax")}


def test_ranges_of_two_threads_may_overlap_without_nesting(builder: ExportBuilder) -> None:
    with builder:
        builder.range("first", 0, 20, thread=1)
        builder.range("second", 10, 30, thread=2)
        for moment, name in ((5, "a"), (15, "b"), (25, "c"), (35, "d")):
            builder.call("cudaLaunchKernel", moment, moment + 1, moment)
            builder.kernel(name, 100 + moment, 101 + moment, moment)
    assert ranges_by_kernel(builder) == {
        "a": ("first",),
        "b": ("first", "second"),
        "c": ("second",),
        "d": (),
    }


@pytest.mark.parametrize("event", [59, 60, 70, 71])
@pytest.mark.parametrize("registered", [False, True], ids=["text", "textId"])
def test_every_kind_of_range_is_read(builder: ExportBuilder, event: int, registered: bool) -> None:
    with builder:
        builder.range("forward", 0, 50, event=event, registered=registered)
        builder.call("cudaLaunchKernel", 10, 12, 1)
        builder.kernel("k", 20, 30, 1)
    assert ranges_by_kernel(builder) == {"k": ("forward",)}


@pytest.mark.parametrize("event", [34, 75], ids=["mark", "domain"])
def test_other_nvtx_events_are_no_ranges(builder: ExportBuilder, event: int) -> None:
    with builder:
        builder.range("CCCL", -500, None, event=event)
        builder.call("cudaLaunchKernel", 10, 12, 1)
        builder.kernel("k", 20, 30, 1)
    assert ranges_by_kernel(builder) == {"k": ()}
    assert nsys.read(builder.path).ranges.empty


def test_a_range_that_was_never_closed_lasts_until_the_end(builder: ExportBuilder) -> None:
    with builder:
        builder.range("step", 5, None)
        builder.call("cudaLaunchKernel", 10, 12, 1)
        builder.kernel("k", 20, 95, 1)
    trace = nsys.read(builder.path)
    assert trace.kernels["ranges"].tolist() == [("step",)]
    assert trace.ranges["duration_ns"].tolist() == [90]


def test_operator_ranges_lose_their_counters(builder: ExportBuilder) -> None:
    with builder:
        builder.range("aten::mul, op_id = 7, sizes = [[4, 12], []]", 0, 9)
        builder.range("MulBackward0, seq = 3, op_id = 8, sizes = [[4]]", 10, 19)
        builder.range("a, b = c", 20, 29)
    assert nsys.read(builder.path).ranges["name"].tolist() == [
        "aten::mul",
        "MulBackward0",
        "a, b = c",
    ]


def test_copies_and_sets_are_rows_of_the_copy_family(builder: ExportBuilder) -> None:
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


def test_a_graph_whose_kernels_were_not_traced_is_one_row(builder: ExportBuilder) -> None:
    with builder:
        builder.range("replay", 0, 50)
        builder.call("cudaGraphLaunch_v10000", 10, 12, 1)
        builder.graph(5, 20, 80, 1)
    kernel = nsys.read(builder.path).kernels.iloc[0]
    assert (kernel["name"], kernel["kind"], kernel["family"]) == ("CUDA graph 5", "graph", "other")
    assert (kernel["duration_ns"], kernel["launch_ns"], kernel["ranges"]) == (60, 10, ("replay",))


def test_the_kernels_of_a_graph_share_its_launch_and_replace_its_bar(
    builder: ExportBuilder,
) -> None:
    with builder:
        builder.range("replay", 0, 50)
        builder.call("cudaGraphLaunch_v10000", 10, 12, 1)
        builder.kernel("a", 20, 40, 1, graphNodeId=100)
        builder.kernel("b", 40, 80, 1, graphNodeId=101)
        builder.graph(5, 20, 80, 1)
        builder.graph(6, 90, 95, 2)
    kernels = nsys.read(builder.path).kernels
    assert kernels["name"].tolist() == ["a", "b", "CUDA graph 6"]
    assert kernels["ranges"].tolist() == [("replay",), ("replay",), ()]


def test_of_a_runtime_call_and_the_driver_call_in_it_the_outer_one_launches(
    builder: ExportBuilder,
) -> None:
    with builder:
        builder.call("cuLaunchKernel", 12, 14, 1)
        builder.call("cudaLaunchKernel", 10, 15, 1)
        builder.kernel("k", 20, 30, 1)
    assert nsys.read(builder.path).kernels["launch_ns"].tolist() == [10]


def test_a_kernel_without_a_recorded_launch_has_no_ranges(builder: ExportBuilder) -> None:
    with builder:
        builder.range("forward", 0, 100)
        builder.call("cudaLaunchKernel", 10, 12, 1)
        builder.kernel("k", 20, 30, 2)
    kernels = nsys.read(builder.path).kernels
    assert kernels["ranges"].tolist() == [()]
    assert kernels[["launch_ns", "delay_ns"]].isna().all(axis=None)


def test_plain_kernels_count_as_optimizer_in_its_range_and_products_do_not(
    builder: ExportBuilder,
) -> None:
    names = ["elementwise_kernel", "ampere_sgemm_32x32_nn", "ncclDevKernel_AllReduce"]
    with builder:
        builder.range("optimizer step", 0, 50)
        for row, name in enumerate([*names, "elementwise_kernel"]):
            launch = 10 + 30 * row
            builder.call("cudaLaunchKernel", launch, launch + 1, row)
            builder.kernel(name, 200 + row, 201 + row, row)
        builder.range("optimizer", 60, 80)
    families = nsys.read(builder.path).kernels["family"].tolist()
    assert families == ["optimizer", "matmul_simt", "communication", "elementwise"]


EMPTY_TABLES = ["StringIds", "CUPTI_ACTIVITY_KIND_KERNEL", "NVTX_EVENTS"]


@pytest.mark.parametrize("tables", [[], EMPTY_TABLES], ids=["no tables", "empty tables"])
def test_an_export_in_which_nothing_happened_gives_empty_frames(
    builder: ExportBuilder, tables: list[str]
) -> None:
    with builder:
        for table in tables:
            builder.table(table)
    trace = nsys.read(builder.path)
    assert (len(trace.kernels), len(trace.host), len(trace.ranges)) == (0, 0, 0)
    assert tuple(trace.kernels.columns) == KERNEL_COLUMNS
    assert tuple(trace.ranges.columns) == RANGE_COLUMNS
    assert pd.api.types.is_integer_dtype(trace.kernels["launch_ns"])


def test_a_missing_file_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"trace: .*none\.sqlite does not exist"):
        nsys.read(tmp_path / "none.sqlite")


def test_a_file_of_another_kind_is_one_clear_line(tmp_path: Path) -> None:
    file = tmp_path / "report.nsys-rep"
    file.write_bytes(b"not a database" * 100)
    with pytest.raises(TraceError, match=r"is not an SQLite export of Nsight Systems: file is not"):
        nsys.read(file)


def test_a_foreign_database_is_one_clear_line(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "foreign.sqlite") as database:
        database.execute("CREATE TABLE people (name TEXT)")
    database.close()
    with pytest.raises(TraceError, match="it has no table META_DATA_EXPORT"):
        nsys.read(tmp_path / "foreign.sqlite")


@pytest.mark.parametrize("schema", ["", "unknown"])
def test_an_unreadable_schema_version_is_named(tmp_path: Path, schema: str) -> None:
    with ExportBuilder(tmp_path / "e.sqlite", schema=schema) as builder:
        builder.table("StringIds")
    with pytest.raises(TraceError, match=f"EXPORT_SCHEMA_VERSION is '{schema}'"):
        nsys.read(builder.path)


def test_a_column_that_a_schema_no_longer_has_is_named(tmp_path: Path) -> None:
    with ExportBuilder(tmp_path / "e.sqlite", schema="9.0.0") as builder:
        builder.execute("CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INTEGER, end INTEGER)")
    with pytest.raises(TraceError, match=r"KERNEL of schema 9\.0\.0: no such column: streamId"):
        nsys.read(builder.path)
