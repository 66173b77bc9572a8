"""Elapsed time on the device: busy, idle, what it waited for, which ranges were slow."""

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

Read = Callable[[Callable[[ExportBuilder], None]], Trace]


@pytest.fixture
def read(tmp_path: Path) -> Read:
    def built(build: Callable[[ExportBuilder], None]) -> Trace:
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


def test_busy_time_and_span_are_summed_over_devices() -> None:
    both = pd.concat([ran([(0, 10)]), ran([(0, 10)], device=1)], ignore_index=True)
    assert (gpu_time.busy_ns(both), gpu_time.span_ns(both)) == (20, 20)


def test_a_gap_is_the_hosts_if_the_kernel_was_not_launched_yet(read: Read) -> None:
    def build(builder: ExportBuilder) -> None:
        for correlation, (launch, start) in enumerate([(0, 10), (15, 30), (50, 60)]):
            builder.launched("k", launch, start, start + 10, correlation)
        builder.kernel("launch unknown", 90, 95, 77)

    gaps = gpu_time.launch_gaps(read(build).kernels)
    # Idle from 20: the second was queued since 15. Idle from 40: the third was launched at 50.
    assert gaps["gap_ns"].tolist() == [0, 10, 20, 20]
    assert gaps["host_late"].tolist() == [False, False, True, False]


def test_a_wait_comes_after_the_outermost_range_that_closed_last(read: Read) -> None:
    def build(builder: ExportBuilder) -> None:
        builder.call("cudaEventSynchronize", 0, 2, 1)
        builder.range("inner", 5, 20)
        builder.range("outer", 3, 20)
        builder.range("of another rank", 3, 30, process=2)
        builder.call("cudaStreamSynchronize", 40, 50, 2)

    waits = gpu_time.waits(read(build))
    assert waits[["name", "duration_ns", "after"]].to_numpy().tolist() == [
        ["cudaStreamSynchronize", 10, "outer"],
        ["cudaEventSynchronize", 2, None],
    ]


def layers(builder: ExportBuilder) -> None:
    """Five layers of a millisecond, except that the fourth takes ten, nine in an allocation."""
    for layer, length in enumerate([1_000_000, 1_000_000, 1_000_000, 10_000_000, 1_000_000]):
        start = layer * 20_000_000
        builder.range("layer", start, start + length)
        builder.launched("ampere_sgemm_32x32_nn", start + 10, start + 30, start + 900, layer)
    builder.call("cudaMalloc", 60_500_000, 69_500_000, 99)
    builder.range("once", 0, 10**9)


def test_a_range_of_many_times_its_median_is_found_with_what_ran_in_it(read: Read) -> None:
    trace = read(layers)
    slow = gpu_time.slow_ranges(trace)
    columns = ["name", "start_ns", "median_ns", "instances", "kernel", "call"]
    assert slow[columns].to_numpy().tolist() == [
        ["layer", 60_000_000, 1_000_000, 5, "ampere_sgemm_32x32_nn", "cudaMalloc"]
    ]
    assert len(gpu_time.slow_ranges(trace, factor=0.5)) == 5
    assert gpu_time.slow_ranges(trace, min_ns=20_000_000).empty
    assert len(gpu_time.slow_ranges(trace, factor=0.5, most=2)) == 2
