"""Elapsed time on the device: busy, idle, what it waited for, which ranges were slow."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmlab.measure.trace import gpu_time, nsys
from tests.measure.trace.export_builder import ExportBuilder


@pytest.fixture
def builder(tmp_path: Path) -> ExportBuilder:
    return ExportBuilder(tmp_path / "export.sqlite")


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 100), st.integers(0, 30), st.integers(0, 1)),
        min_size=1,
        max_size=30,
    )
)
def test_busy_time_counts_every_covered_nanosecond_of_a_device_once(
    intervals: list[tuple[int, int, int]],
) -> None:
    frame = pd.DataFrame(np.array(intervals), columns=["start_ns", "duration_ns", "device"])
    frame = frame.assign(launch_ns=frame["start_ns"].astype("Int64"))
    covered = {(d, tick) for s, length, d in intervals for tick in range(s, s + length)}
    assert gpu_time.busy_ns(frame) == len(covered)
    ends = frame["start_ns"] + frame["duration_ns"]
    spans = ends.groupby(frame["device"]).max() - frame.groupby("device")["start_ns"].min()
    assert gpu_time.span_ns(frame) == spans.sum()


def test_a_gap_is_the_hosts_if_the_kernel_was_not_launched_yet(builder: ExportBuilder) -> None:
    with builder:
        for correlation, (launch, start) in enumerate([(0, 10), (15, 30), (50, 60)]):
            builder.launched("k", launch, start, start + 10, correlation)
        builder.kernel("launch unknown", 90, 95, 77)
    gaps = gpu_time.launch_gaps(nsys.read(builder.path).kernels)
    # Idle from 20: the second was queued since 15. Idle from 40: the third was launched at 50.
    assert gaps["gap_ns"].tolist() == [0, 10, 20, 20]
    assert gaps["host_late"].tolist() == [False, False, True, False]


def test_a_wait_comes_after_the_outermost_range_that_closed_last(builder: ExportBuilder) -> None:
    with builder:
        builder.call("cudaEventSynchronize", 0, 2, 1)
        builder.range("inner", 5, 20)
        builder.range("outer", 3, 20)
        builder.range("of another rank", 3, 30, process=2)
        builder.call("cudaStreamSynchronize", 40, 50, 2)
    waits = gpu_time.waits(nsys.read(builder.path))
    assert waits[["name", "duration_ns", "after"]].to_numpy().tolist() == [
        ["cudaStreamSynchronize", 10, "outer"],
        ["cudaEventSynchronize", 2, None],
    ]


def test_a_range_of_many_times_its_median_is_found(builder: ExportBuilder) -> None:
    with builder:
        for layer, length in enumerate([1_000_000, 1_000_000, 1_000_000, 10_000_000, 1_000_000]):
            start = layer * 20_000_000
            builder.range("layer", start, start + length)
            builder.launched("ampere_sgemm_32x32_nn", start + 10, start + 30, start + 900, layer)
        builder.range("once", 0, 10**9)
    trace = nsys.read(builder.path)
    slow = gpu_time.slow_ranges(trace)
    assert slow[["name", "start_ns", "median_ns", "kernel"]].to_numpy().tolist() == [
        ["layer", 60_000_000, 1_000_000, "ampere_sgemm_32x32_nn"]
    ]
    assert gpu_time.slow_ranges(trace, min_ns=20_000_000).empty
    assert len(gpu_time.slow_ranges(trace, factor=0.5, most=2)) == 2
