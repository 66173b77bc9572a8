"""Traces of PyTorch's profiler as frames; a GPU's from events in the shape of real ones."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from lmlab.measure.trace import chrome_trace, nsys
from lmlab.measure.trace.frames import Trace, TraceError
from tests.measure.trace.export_builder import ExportBuilder

BASE_US = 3853509385866.126  # as large as real ones: the last digit must survive
PID, MAIN, AUTOGRAD = 428, 428, 455


def event(category: str, name: str, start_us: float, duration_us: float, **fields: Any) -> Any:
    arguments = {"device": 0, "stream": 7, "correlation": fields.pop("correlation", 0)}
    times = {"ts": round(BASE_US + start_us, 3), "dur": duration_us}
    return {
        "ph": "X",
        "cat": category,
        "name": name,
        "pid": PID,
        "tid": MAIN,
        "args": arguments,
    } | (times | fields)


TRAIN_STEP = [
    event("user_annotation", "forward", 0, 20),
    event("user_annotation", "layers.0", 4, 8),
    event("user_annotation", "backward", 20, 20),
    event("cuda_runtime", "cudaLaunchKernel", 5, 2, correlation=1),
    event("kernel", "ampere_sgemm_128x64_tn", 15.5, 20.125, pid=0, tid=7, correlation=1),
    event("cuda_driver", "cuLaunchKernelEx", 25, 2, correlation=2, tid=AUTOGRAD),
    event("kernel", "nvjet_sm90_tst_64x64_NNT", 36, 4, pid=0, tid=7, correlation=2),
    event("cuda_runtime", "cudaMemcpyAsync", 41, 1, correlation=3),
    event("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 44, 3, pid=0, tid=7, correlation=3),
    event("cuda_runtime", "cudaDeviceSynchronize", 42, 9, correlation=4),
    # What is drawn besides must not count as work.
    event("gpu_user_annotation", "forward", 15, 30, pid=0, tid=7),
    event("cpu_op", "aten::mm", 4, 4),
    {"ph": "s", "cat": "ac2g", "name": "ac2g", "pid": PID, "tid": MAIN, "ts": BASE_US, "id": 1},
    {"ph": "M", "name": "process_name", "pid": PID, "tid": 0, "ts": 0, "args": {"name": "python"}},
]


@pytest.fixture
def trace(tmp_path: Path) -> Trace:
    file = tmp_path / "trace.json"
    file.write_text(json.dumps({"traceEvents": TRAIN_STEP}))
    return chrome_trace.read(file, on_cpu=False)


def test_kernels_belong_to_the_ranges_of_their_launch_whatever_the_thread(trace: Trace) -> None:
    assert trace.kernels[["name", "kind", "family", "ranges"]].to_numpy().tolist() == [
        ["ampere_sgemm_128x64_tn", "kernel", "matmul_simt", ("forward", "layers.0")],
        ["nvjet_sm90_tst_64x64_NNT", "kernel", "matmul_tensor_core", ("backward",)],
        ["Memcpy DtoH (Device -> Pinned)", "memcpy", "copy", ()],
    ]


def test_times_are_whole_nanoseconds(trace: Trace) -> None:
    first = trace.kernels.iloc[0]
    assert (first["start_ns"], first["duration_ns"]) == (3853509385881626, 20_125)
    assert first["delay_ns"] == 10_500


def test_device_events_get_the_process_of_their_calls(trace: Trace) -> None:
    assert set(trace.kernels["process"]) == set(trace.host["process"]) == {PID}
    assert set(trace.kernels["stream"]) == {7}


def test_host_calls_of_runtime_and_driver_are_read(trace: Trace) -> None:
    assert trace.host[["name", "kind", "thread"]].to_numpy().tolist() == [
        ["cudaLaunchKernel", "launch", MAIN],
        ["cuLaunchKernelEx", "launch", AUTOGRAD],
        ["cudaMemcpyAsync", "launch", MAIN],
        ["cudaDeviceSynchronize", "synchronize", MAIN],
    ]


def test_both_tools_give_the_same_frames(trace: Trace, tmp_path: Path) -> None:
    with ExportBuilder(tmp_path / "export.sqlite") as builder:
        builder.range("forward", 0, 50)
        builder.call("cudaLaunchKernel_v7000", 10, 12, 1)
        builder.kernel("ampere_sgemm_128x64_tn", 20, 30, 1)
    other = nsys.read(builder.path)
    for name in ("kernels", "host", "ranges"):
        mine, theirs = getattr(trace, name).dtypes, getattr(other, name).dtypes
        assert mine.astype(str).to_dict() == theirs.astype(str).to_dict()
    for column in ("family", "kind"):
        assert trace.kernels[column].dtype == other.kernels[column].dtype


def test_a_gzipped_trace_is_read_as_well(tmp_path: Path, trace: Trace) -> None:
    file = tmp_path / "trace.json.gz"
    file.write_bytes(gzip.compress(json.dumps({"traceEvents": TRAIN_STEP}).encode()))
    pd.testing.assert_frame_equal(chrome_trace.read(file, on_cpu=False).kernels, trace.kernels)


@pytest.mark.parametrize("on_cpu", [False, True])
def test_a_trace_of_nothing_gives_empty_frames(tmp_path: Path, on_cpu: bool) -> None:
    file = tmp_path / "trace.json"
    file.write_text('{"traceEvents": []}')
    trace = chrome_trace.read(file, on_cpu=on_cpu)
    assert (len(trace.kernels), len(trace.host), len(trace.ranges)) == (0, 0, 0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("not json", "is not a profiler's JSON trace"),
        ("[]", "no traceEvents"),
        ('{"traceEvents": 5}', "no traceEvents"),
    ],
)
def test_another_file_is_one_clear_line(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "trace.json"
    file.write_text(text)
    with pytest.raises(TraceError, match=message):
        chrome_trace.read(file, on_cpu=False)


def test_a_missing_file_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"none\.json does not exist"):
        chrome_trace.read(tmp_path / "none.json", on_cpu=False)
