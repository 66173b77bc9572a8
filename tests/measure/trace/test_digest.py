"""A trace reduced to kilobytes, and its timeline: everything that is counted adds up."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmlab.measure.trace import digest as module
from lmlab.measure.trace import nsys
from lmlab.measure.trace.digest import Names, digest, section, slow_ranges
from lmlab.measure.trace.frames import Trace
from lmlab.measure.trace.timeline import BINS, busy_until, one_layer, timeline
from tests.measure.trace import three_modes
from tests.measure.trace.export_builder import ExportBuilder
from tests.measure.trace.three_modes import BACKWARD_US, FORWARD_US, OPTIMIZER_US, US, write_export

MODES = ("forward", "forward_backward", "train_step")
PHASES_US = {
    "zero_grad": 0,
    "forward": FORWARD_US,
    "backward": BACKWARD_US,
    "optimizer": OPTIMIZER_US,
}
PHASES = list(PHASES_US)


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    path = tmp_path_factory.mktemp("export") / "export.sqlite"
    write_export(path)
    return nsys.read(path)


@pytest.fixture(scope="module")
def step(trace: Trace) -> Trace:
    return section(trace, "mode train_step")


@pytest.fixture
def builder(tmp_path: Path) -> ExportBuilder:
    return ExportBuilder(tmp_path / "export.sqlite")


def test_a_section_holds_one_run(trace: Trace) -> None:
    forward = section(trace, "mode forward")
    assert forward.kernels["duration_ns"].sum() == FORWARD_US * US
    assert (forward.host["kind"] == "synchronize").sum() == 1
    assert sum(len(section(trace, f"mode {m}").kernels) for m in MODES) == len(trace.kernels)
    assert digest(section(trace, "no such mode"), PHASES, Names())["total_ns"] == 0


def test_phases_and_families_add_up_to_the_run(step: Trace) -> None:
    digested = digest(step, PHASES, Names())
    assert {row["phase"]: row["total_ns"] / US for row in digested["phases"]} == PHASES_US
    total = sum(PHASES_US.values()) * US
    assert digested["total_ns"] == digested["busy_ns"] == digested["span_ns"] == total
    families = digested["families"]
    assert families["optimizer"] == {"total_ns": OPTIMIZER_US * US, "instances": 3}
    assert sum(row["total_ns"] for row in families.values()) == total
    assert sum(row["instances"] for row in families.values()) == digested["kernels"]
    assert json.loads(json.dumps(digested, allow_nan=False)) == digested


def test_rows_beyond_the_limit_are_summed(step: Trace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TABLE_ROWS", 2)
    names = Names()
    digested = digest(step, PHASES, names)
    table, rest = digested["table"], digested["rest"]
    assert names.rows()[table["name"][0]]["name"] == three_modes.SGEMM_BACKWARD
    assert (len(table["name"]), rest["names"]) == (2, 4)
    assert sum(table["total_ns"]) + rest["total_ns"] == digested["total_ns"]
    assert sum(table["instances"]) + rest["instances"] == digested["kernels"]


def test_the_table_has_statistics_by_name_and_no_copies(builder: ExportBuilder) -> None:
    durations = [("sgemm", 10), ("sgemm", 20), ("sgemm", 60), ("b", 5), ("a", 5)]
    with builder:
        builder.range("run", 0, 1000)
        for correlation, (name, duration) in enumerate(durations):
            start = 100 * correlation
            builder.launched(name, start + 10, start + 20, start + 20 + duration, correlation)
        builder.call("cudaMemcpyAsync", 13, 15, 9)
        builder.memcpy(1, 950, 957, 9)
    names = Names()
    digested = digest(section(nsys.read(builder.path), "run"), [], names)
    assert digested["copies"] == {"instances": 1, "total_ns": 7}
    assert [row["name"] for row in names.rows()] == ["sgemm", "a", "b"], "ties in order of name"
    assert digested["table"] == {
        "name": [0, 1, 2],
        "instances": [3, 1, 1],
        "total_ns": [90, 5, 5],
        "min_ns": [10, 5, 5],
        "max_ns": [60, 5, 5],
        "avg_ns": [30.0, 5.0, 5.0],
        "med_ns": [20.0, 5.0, 5.0],
        "sd_ns": [26.5, 0.0, 0.0],  # of a sample; one instance has none
    }


def test_the_host_side_has_waits_launches_and_gaps(step: Trace, builder: ExportBuilder) -> None:
    host = module.host_side(step)
    (wait,) = host["waits"]
    assert (wait["name"], wait["after"]) == ("cudaDeviceSynchronize", "optimizer")
    assert host["wait_ns"] == wait["duration_ns"] > 5000 * US
    assert host["delay_max_ns"] > host["delay_median_ns"] > 1000 * US, "the host is ahead"
    assert (host["gap_ns"], host["gaps"], host["longest_gaps"]) == (0, 0, [])
    calls = {call["name"]: call["calls"] for call in host["calls"]}
    assert calls == {"cudaDeviceSynchronize": 1, "cudaLaunchKernel": len(step.kernels)}
    with builder:
        builder.range("run", 0, 900)
        for correlation, start in enumerate((10, 200)):
            builder.launched(f"sgemm_{start}", start, start + 5, start + 50, correlation)
    late = module.host_side(section(nsys.read(builder.path), "run"))
    gap = {"gap_ns": 145, "host_late": True, "before": "sgemm_200", "ranges": ["run"]}
    assert (late["longest_gaps"], late["host_late_gap_ns"]) == ([gap], 145)


def test_a_slow_range_names_its_run_and_what_ran_in_it(builder: ExportBuilder) -> None:
    with builder:
        builder.range("mode b", 2_000_000, 9_000_000)
        for start, end in ((0, 100), (200, 300), (3_000_000, 8_000_000)):
            builder.range("layers.0", start, end)
        builder.call("cudaMalloc", 3_100_000, 7_000_000, 1)
    (slow,) = slow_ranges(nsys.read(builder.path), ["mode a", "mode b"])
    assert slow == {
        **{"range": "layers.0", "run": "mode b", "kernel": None, "call": "cudaMalloc"},
        **{"duration_ns": 5_000_000, "median_ns": 100, "instances": 3},
    }


def test_the_timeline_has_all_work_in_bins_and_phases_on_both_sides(step: Trace) -> None:
    drawn: Any = timeline(step, PHASES)
    bin_us = drawn["end_ns"] / BINS / US
    work_us = {name: sum(shares) / 1000 * bin_us for name, shares in drawn["families"].items()}
    assert sum(work_us.values()) == pytest.approx(sum(PHASES_US.values()), rel=0.01)
    assert work_us["optimizer"] == pytest.approx(OPTIMIZER_US, rel=0.05)
    assert max(map(max, drawn["families"].values())) == 1000
    rows = drawn["device_phases"]
    found = {row["phase"]: row["duration_ns"] / US for row in rows}
    assert found == {phase: us for phase, us in PHASES_US.items() if us}
    for before, after in pairwise(rows):
        assert before["start_ns"] + before["duration_ns"] == after["start_ns"]
    host = {row["phase"]: row for row in drawn["host_phases"]}
    assert list(host) == PHASES
    assert host["optimizer"]["start_ns"] < rows[1]["start_ns"], "the host runs ahead"


def test_one_layer_is_stored_kernel_by_kernel(step: Trace) -> None:
    names = Names()
    layer: Any = one_layer(step, "forward", ("scores", "softmax", "output"), names)
    assert layer["layer"] == "layers.1"
    families = [names.rows()[index]["family"] for index in layer["name"]]
    gemm, pointwise = "matmul_simt", "elementwise"
    assert families == [gemm, gemm, pointwise, pointwise, "softmax", gemm, gemm]
    assert layer["part"] == [None, "scores", "softmax", "softmax", "softmax", "output", None]
    assert layer["start_ns"][0] == 0
    assert [ns / US for ns in layer["duration_ns"]] == [400, 100, 30, 20, 50, 100, 400]
    assert one_layer(step, "backward", (), Names()) is None, "no layer is marked there"
    nothing = Trace(step.kernels.iloc[:0], step.host, step.ranges, "none")
    assert timeline(nothing, PHASES) is None


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 30)), min_size=1, max_size=20))
def test_busy_until_counts_every_covered_tick_once(intervals: list[tuple[int, int]]) -> None:
    starts, lengths = np.array(intervals, dtype=np.int64).T
    covered = {tick for start, length in intervals for tick in range(start, start + length)}
    moments = np.arange(0, 100, 7, dtype=np.float64)
    expected = [sum(tick < moment for tick in covered) for moment in moments]
    assert busy_until(starts, starts + lengths, moments).tolist() == expected
