"""A trace reduced to times on the device, to a digest and to a timeline: all of it adds up."""

from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmlab.measure.trace import digest, nsys
from lmlab.measure.trace.frames import Trace
from lmlab.measure.trace.kernel_names import family
from tests.measure.trace.export_builder import ExportBuilder
from tests.measure.trace.three_modes import BACKWARD_US, FORWARD_US, OPTIMIZER_US, US, write_export

MODES = ("forward", "forward_backward", "train_step")
PHASES_US = {"zero_grad": 0, "forward": FORWARD_US}
PHASES_US |= {"backward": BACKWARD_US, "optimizer": OPTIMIZER_US}
PHASES = list(PHASES_US)


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    path = tmp_path_factory.mktemp("export") / "export.sqlite"
    write_export(path)
    return nsys.read(path)


@pytest.fixture(scope="module")
def step(trace: Trace) -> Trace:
    return digest.section(trace, "mode train_step")


def test_a_section_holds_one_run(trace: Trace) -> None:
    forward = digest.section(trace, "mode forward")
    assert forward.kernels["duration_ns"].sum() == FORWARD_US * US
    assert (forward.host["kind"] == "synchronize").sum() == 1
    assert sum(len(digest.section(trace, f"mode {m}").kernels) for m in MODES) == len(trace.kernels)
    total = sum(PHASES_US.values()) * US
    times = digest.device_times(digest.section(trace, "mode train_step").kernels)
    assert times["total_ns"] == times["busy_ns"] == times["span_ns"] == total
    assert digest.device_times(digest.section(trace, "no such mode").kernels)["total_ns"] == 0


def test_the_table_has_statistics_by_name_and_no_copies(builder: ExportBuilder) -> None:
    durations = [("sgemm", 10), ("sgemm", 20), ("sgemm", 60), ("b", 5), ("a", 5)]
    builder.range("run", 0, 1000)
    for correlation, (name, duration) in enumerate(durations):
        start = 100 * correlation
        builder.launched(name, start + 10, start + 20, start + 20 + duration, correlation)
    builder.call("cudaMemcpyAsync", 13, 15, 9)
    builder.memcpy(1, 950, 957, 9)
    kernels = nsys.read(builder.path).kernels
    assert kernels["duration_ns"][digest.is_copy(kernels)].tolist() == [7]
    assert digest.kernel_summary(kernels).round(1).to_dict("list") == {
        "name": ["sgemm", "a", "b"],  # ties in order of name
        "instances": [3, 1, 1],
        "total_ns": [90, 5, 5],
        "min_ns": [10, 5, 5],
        "max_ns": [60, 5, 5],
        "avg_ns": [30.0, 5.0, 5.0],
        "med_ns": [20.0, 5.0, 5.0],
        "sd_ns": [26.5, 0.0, 0.0],  # of a sample; one instance has none
    }


def test_the_host_side_has_waits_and_launches(step: Trace) -> None:
    host: Any = digest.host_side(step)
    assert host["wait_ns"] > 5000 * US
    assert host["delay_max_ns"] > host["delay_median_ns"] > 1000 * US, "the host is ahead"
    assert (host["gap_ns"], host["gaps"], host["launches"]) == (0, 0, len(step.kernels))
    assert host["launch_ns"] == 5 * US
    calls = {call["name"]: call["calls"] for call in digest.host_calls(step)}
    assert calls == {"cudaDeviceSynchronize": 1, "cudaLaunchKernel": len(step.kernels)}


def test_the_timeline_has_phases_on_both_sides(step: Trace) -> None:
    drawn: Any = digest.timeline(step, PHASES)
    rows = drawn["device_phases"]
    found = {row["phase"]: row["duration_ns"] / US for row in rows}
    assert found == {phase: us for phase, us in PHASES_US.items() if us}
    for before, after in pairwise(rows):
        assert before["start_ns"] + before["duration_ns"] == after["start_ns"]
    host = {row["phase"]: row for row in drawn["host_phases"]}
    assert list(host) == PHASES
    assert host["optimizer"]["start_ns"] < rows[1]["start_ns"], "the host runs ahead"


def test_one_layer_is_stored_kernel_by_kernel(step: Trace) -> None:
    layer: Any = digest.one_layer(step, "forward", ("scores", "softmax", "output"))
    assert layer["layer"] == "layers.1"
    families = [family(name) for name in layer["name"]]
    gemm, pointwise = "matmul_simt", "elementwise"
    assert families == [gemm, gemm, pointwise, pointwise, "softmax", gemm, gemm]
    assert layer["part"] == [None, "scores", "softmax", "softmax", "softmax", "output", None]
    assert layer["start_ns"][0] == 0
    assert [ns / US for ns in layer["duration_ns"]] == [400, 100, 30, 20, 50, 100, 400]
    assert digest.one_layer(step, "backward", ()) is None, "no layer is marked there"


INTERVALS = st.tuples(st.integers(0, 100), st.integers(0, 30), st.integers(0, 1))


@settings(max_examples=30)
@given(st.lists(INTERVALS, min_size=1, max_size=30))
def test_busy_time_counts_overlaps_once(intervals: list[tuple[int, int, int]]) -> None:
    frame = pd.DataFrame(np.array(intervals), columns=["start_ns", "duration_ns", "device"])
    frame = frame.assign(launch_ns=frame["start_ns"].astype("Int64"))
    covered = {(d, tick) for s, length, d in intervals for tick in range(s, s + length)}
    assert digest.busy_ns(frame) == len(covered)
    ends = frame["start_ns"] + frame["duration_ns"]
    spans = ends.groupby(frame["device"]).max() - frame.groupby("device")["start_ns"].min()
    assert digest.span_ns(frame) == spans.sum()


def test_a_gap_is_the_hosts_if_the_kernel_was_not_launched_yet(builder: ExportBuilder) -> None:
    for correlation, (launch, start) in enumerate([(0, 10), (15, 30), (50, 60)]):
        builder.launched("k", launch, start, start + 10, correlation)
    builder.kernel("launch unknown", 90, 95, 77)
    trace = nsys.read(builder.path)
    gaps = digest.launch_gaps(trace.kernels)
    # Idle from 20: the second was queued since 15. Idle from 40: the third was launched at 50.
    assert gaps["gap_ns"].tolist() == [0, 10, 20, 20]
    assert gaps["host_late"].tolist() == [False, False, True, False]
    host = digest.host_side(trace)
    assert (host["gaps"], host["gap_ns"], host["host_late_gap_ns"]) == (3, 50, 20)
