"""Traces of the PyTorch profiler as frames; GPU traces from events shaped like real ones."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from lmlab.measure.trace import chrome_trace, nsys
from lmlab.measure.trace.frames import Trace
from tests.measure.trace.export_builder import ExportBuilder

BASE_US = 3853509385866.126  # as large as real ones: the last digit must survive
PID, MAIN, AUTOGRAD = 428, 428, 455


def event(category: str, name: str, start_us: float, duration_us: float, **fields: Any) -> Any:
    arguments = {"device": 0, "stream": 7, "correlation": fields.pop("correlation", 0)}
    times = {"ts": round(BASE_US + start_us, 3), "dur": duration_us}
    identity = {"ph": "X", "cat": category, "name": name, "pid": PID, "tid": MAIN}
    return identity | {"args": arguments} | times | fields


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
    # Drawn in addition; must not count as work.
    event("gpu_user_annotation", "forward", 15, 30, pid=0, tid=7),
    event("cpu_op", "aten::mm", 4, 4),
    {"ph": "s", "cat": "ac2g", "name": "ac2g", "pid": PID, "tid": MAIN, "ts": BASE_US, "id": 1},
    {"ph": "M", "name": "process_name", "pid": PID, "tid": 0, "ts": 0, "args": {"name": "python"}},
]


def read(file: Path, events: list[Any], *, on_cpu: bool = False) -> Trace:
    text = json.dumps({"traceEvents": events}).encode()
    file.write_bytes(gzip.compress(text) if file.suffix == ".gz" else text)
    return chrome_trace.read(file, on_cpu=on_cpu)


@pytest.fixture(params=["trace.json", "trace.json.gz"])
def trace(tmp_path: Path, request: pytest.FixtureRequest) -> Trace:
    return read(tmp_path / request.param, TRAIN_STEP)


def test_kernels_belong_to_the_ranges_of_their_launch_whatever_the_thread(trace: Trace) -> None:
    assert trace.kernels[["name", "kind", "family", "ranges"]].to_numpy().tolist() == [
        ["ampere_sgemm_128x64_tn", "kernel", "matmul_simt", ("forward", "layers.0")],
        ["nvjet_sm90_tst_64x64_NNT", "kernel", "matmul_tensor_core", ("backward",)],
        ["Memcpy DtoH (Device -> Pinned)", "memcpy", "copy", ()],
    ]
    first = trace.kernels.iloc[0]
    times = (first["start_ns"], first["duration_ns"], first["delay_ns"])
    assert times == (3853509385881626, 20_125, 10_500), "whole nanoseconds"
    assert trace.host[["name", "kind"]].to_numpy().tolist() == [
        ["cudaLaunchKernel", "launch"],
        ["cuLaunchKernelEx", "launch"],
        ["cudaMemcpyAsync", "launch"],
        ["cudaDeviceSynchronize", "synchronize"],
    ]


def test_both_tools_give_frames_of_the_same_types(trace: Trace, builder: ExportBuilder) -> None:
    builder.range("forward", 0, 50)
    builder.launched("ampere_sgemm_128x64_tn", 10, 20, 30, 1)
    other = nsys.read(builder.path)
    for name in ("kernels", "host", "ranges"):
        mine, theirs = getattr(trace, name).dtypes, getattr(other, name).dtypes
        assert mine.astype(str).to_dict() == theirs.astype(str).to_dict()
    for column in ("family", "kind"):
        assert trace.kernels[column].dtype == other.kernels[column].dtype


@pytest.mark.parametrize("on_cpu", [False, True])
def test_an_empty_trace_gives_empty_frames(tmp_path: Path, on_cpu: bool) -> None:
    trace = read(tmp_path / "trace.json", [], on_cpu=on_cpu)
    assert (len(trace.kernels), len(trace.host), len(trace.ranges)) == (0, 0, 0)


# Start, duration, thread, and self time in microseconds; the computing ones first.
COMPUTING = {
    "aten::mm": (12, 60, MAIN, 59),  # although it calls others
    "aten::add": (100, 20, MAIN, 20),
    "aten::mul": (105, 10, AUTOGRAD, 10),
    "mylib::leaf": (210, 10, MAIN, 10),
}
BOOKKEEPING = {
    "aten::linear": (0, 90, MAIN, 15),
    "aten::t": (2, 5, MAIN, 5),
    "aten::matmul": (10, 70, MAIN, 10),
    "aten::resolve_conj": (13, 1, MAIN, 1),
    "mylib::composite": (200, 30, MAIN, 20),
    "autograd::engine::evaluate_function: MulBackward0": (300, 5, MAIN, 5),
    "MulBackward0": (305, 5, MAIN, 5),
}


def test_cpu_operators_compute_or_do_bookkeeping_and_have_self_times(tmp_path: Path) -> None:
    events = [
        event("cpu_op", name, start, duration, tid=thread)
        for name, (start, duration, thread, _) in {**COMPUTING, **BOOKKEEPING}.items()
    ]
    trace = read(tmp_path / "trace.json", events, on_cpu=True)
    for frame, expected in ((trace.kernels, COMPUTING), (trace.host, BOOKKEEPING)):
        found = dict(zip(frame["name"], frame["duration_ns"] / 1000, strict=True))
        assert found == {name: own for name, (*_, own) in expected.items()}
