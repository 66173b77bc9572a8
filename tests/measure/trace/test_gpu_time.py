"""Elapsed time on the device: busy, idle, for whom it waited, which ranges were slow."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmlab.measure.trace import gpu_time, nsys
from lmlab.measure.trace.frames import Trace
from tests.measure.trace.export_builder import ExportBuilder

Build = Callable[[ExportBuilder], None]


@pytest.fixture
def read(tmp_path: Path) -> Callable[[Build], Trace]:
    def built(build: Build) -> Trace:
        with ExportBuilder(tmp_path / "export.sqlite") as builder:
            build(builder)
        return nsys.read(builder.path)

    return built


def ran(intervals: list[tuple[int, int]], device: int = 0) -> pd.DataFrame:
    """A bare kernels frame of (start, duration), each launched as it starts."""
    start = np.array([start for start, _ in intervals], dtype=np.int64)
    columns = {"start_ns": start, "duration_ns": [length for _, length in intervals]}
    frame = pd.DataFrame(columns | {"device": device}, dtype="int64")
    return frame.assign(launch_ns=pd.array(start, dtype="Int64"))


@given(st.lists(st.tuples(st.integers(0, 100), st.integers(0, 30)), min_size=1, max_size=30))
def test_busy_time_counts_every_covered_nanosecond_once(intervals: list[tuple[int, int]]) -> None:
    covered = {tick for start, length in intervals for tick in range(start, start + length)}
    assert gpu_time.busy_ns(ran(intervals)) == len(covered)


def test_devices_are_busy_each_by_itself() -> None:
    both = pd.concat([ran([(0, 10)]), ran([(0, 10)], device=1)], ignore_index=True)
    assert (gpu_time.busy_ns(both), gpu_time.span_ns(both)) == (20, 20)


def test_overlapping_streams_leave_no_gap() -> None:
    gaps = gpu_time.launch_gaps(ran([(0, 50), (10, 10), (30, 5), (60, 5)]))
    assert gaps["gap_ns"].tolist() == [0, 0, 0, 10]


def test_a_gap_is_the_hosts_if_the_kernel_was_not_launched_yet(
    read: Callable[[Build], Trace],
) -> None:
    def build(builder: ExportBuilder) -> None:
        for correlation, (launch, start) in enumerate([(0, 10), (15, 30), (50, 60)]):
            builder.call("cudaLaunchKernel", launch, launch + 2, correlation)
            builder.kernel("k", start, start + 10, correlation)
        builder.kernel("launch unknown", 90, 95, 77)

    gaps = gpu_time.launch_gaps(read(build).kernels)
    # Idle from 20: the second was in the queue since 15; idle from 40: the third came at 50.
    assert gaps["gap_ns"].tolist() == [0, 10, 20, 20]
    assert gaps["host_late"].tolist() == [False, False, True, False]


def train_step(builder: ExportBuilder) -> None:
    builder.range("forward", 0, 100)
    builder.range("backward", 100, 250)
    for correlation, (launch, start, end) in enumerate(
        [(10, 20, 40), (60, 70, 120), (120, 130, 180)]
    ):
        builder.call("cudaLaunchKernel", launch, launch + 5, correlation)
        builder.kernel("k", start, end, correlation)
    builder.call("cudaDeviceSynchronize", 251, 290, 50)


def test_a_phase_is_host_bound_by_the_share_in_which_nothing_ran(
    read: Callable[[Build], Trace],
) -> None:
    table = gpu_time.phase_times(read(train_step), ["forward", "backward", "optimizer"])
    forward, backward, optimizer = table.to_dict("records")
    assert forward | {"host_bound_share": 0} == {
        "range": "forward",
        "kernels": 2,
        "total_ns": 70,
        "busy_ns": 70,
        "span_ns": 100,
        "host_bound_share": 0,
        "host_ns": 100,
    }
    assert forward["host_bound_share"] == pytest.approx(0.3)
    assert (backward["busy_ns"], backward["host_bound_share"]) == (50, 0.0)
    assert (optimizer["kernels"], optimizer["busy_ns"], optimizer["span_ns"]) == (0, 0, 0)
    assert np.isnan(optimizer["host_bound_share"])


def test_a_wait_is_placed_after_the_range_that_closed_last(read: Callable[[Build], Trace]) -> None:
    waits = gpu_time.waits(read(train_step))
    assert waits[["name", "duration_ns", "after"]].to_numpy().tolist() == [
        ["cudaDeviceSynchronize", 39, "backward"]
    ]


def test_of_ranges_that_close_together_the_outermost_is_named(
    read: Callable[[Build], Trace],
) -> None:
    def build(builder: ExportBuilder) -> None:
        builder.range("inner", 5, 20)
        builder.range("outer", 0, 20)
        builder.range("of another rank", 0, 30, process=2)
        builder.call("cudaStreamSynchronize", 40, 50, 1)

    assert gpu_time.waits(read(build))["after"].tolist() == ["outer"]


def test_a_wait_before_any_range_is_after_none(read: Callable[[Build], Trace]) -> None:
    waits = gpu_time.waits(read(lambda builder: builder.call("cudaEventSynchronize", 0, 5, 1)))
    assert waits["after"].tolist() == [None]


def layers(builder: ExportBuilder) -> None:
    """Five layers of a millisecond; the fourth takes ten, nine of them in an allocation."""
    for layer, length in enumerate([1_000_000, 1_000_000, 1_000_000, 10_000_000, 1_000_000]):
        start = layer * 20_000_000
        builder.range("layer", start, start + length)
        builder.call("cudaLaunchKernel", start + 10, start + 20, layer)
        builder.kernel("ampere_sgemm_32x32_nn", start + 30, start + 900, layer)
    builder.call("cudaMalloc", 60_500_000, 69_500_000, 99)
    builder.range("once", 0, 10**9)


def test_a_range_of_many_times_its_median_is_found_with_what_ran_in_it(
    read: Callable[[Build], Trace],
) -> None:
    slow = gpu_time.slow_ranges(read(layers))
    columns = ["name", "start_ns", "times_median", "instances", "kernel", "call"]
    assert slow[columns].to_numpy().tolist() == [
        ["layer", 60_000_000, 10.0, 5, "ampere_sgemm_32x32_nn", "cudaMalloc"]
    ]


def test_short_ranges_and_lower_factors_can_be_asked_for(read: Callable[[Build], Trace]) -> None:
    trace = read(layers)
    assert len(gpu_time.slow_ranges(trace, times=0.5)) == 5
    assert gpu_time.slow_ranges(trace, at_least_ns=20_000_000).empty
    assert len(gpu_time.slow_ranges(trace, times=0.5, most=2)) == 2
