"""The timeline in bins, phases on host and device, and the kernels of one layer."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmlab.measure.trace import nsys
from lmlab.measure.trace.digest import Names, section
from lmlab.measure.trace.frames import Trace
from lmlab.measure.trace.timeline import BINS, busy_until, one_layer, timeline
from tests.measure.trace.three_modes import BACKWARD_US, FORWARD_US, OPTIMIZER_US, US, write_export

PHASES = ("zero_grad", "forward", "backward", "optimizer")


@pytest.fixture
def step(tmp_path: Path) -> Trace:
    write_export(tmp_path / "export.sqlite")
    return section(nsys.read(tmp_path / "export.sqlite"), "mode train_step")


@pytest.fixture
def drawn(step: Trace) -> dict[str, Any]:
    found = timeline(step, PHASES)
    assert found is not None
    return found


def test_the_bins_of_all_families_add_up_to_all_work(drawn: dict[str, Any]) -> None:
    bin_ns = drawn["end_ns"] / BINS
    work_us = {
        family: sum(shares) / 1000 * bin_ns / US for family, shares in drawn["families"].items()
    }
    everything = FORWARD_US + BACKWARD_US + OPTIMIZER_US
    assert sum(work_us.values()) == pytest.approx(everything, rel=0.01)
    assert work_us["optimizer"] == pytest.approx(OPTIMIZER_US, rel=0.05)
    assert {len(shares) for shares in drawn["families"].values()} == {BINS}
    assert max(map(max, drawn["families"].values())) == 1000


def test_phases_follow_each_other_on_the_device_and_run_ahead_on_the_host(
    drawn: dict[str, Any],
) -> None:
    rows = drawn["device_phases"]
    assert [row["phase"] for row in rows] == ["forward", "backward", "optimizer"]
    assert [row["duration_ns"] / US for row in rows] == [FORWARD_US, BACKWARD_US, OPTIMIZER_US]
    for before, after in pairwise(rows):
        assert before["start_ns"] + before["duration_ns"] == after["start_ns"]
    host = {row["phase"]: row for row in drawn["host_phases"]}
    assert list(host) == list(PHASES)
    assert host["optimizer"]["start_ns"] < rows[1]["start_ns"]


def test_one_layer_is_stored_kernel_by_kernel(step: Trace) -> None:
    names = Names()
    layer = one_layer(step, "forward", ("scores", "softmax", "output"), names)
    assert layer is not None
    assert layer["layer"] == "layers.1"
    kernels = [names.rows()[index]["short_name"] for index in layer["name"]]
    assert [name.split("<")[0] for name in kernels] == [
        *("ampere_sgemm_128x64_tn", "cutlass_80_simt_sgemm_128x128_8x4_nt_align1"),
        *("vectorized_elementwise_kernel", "elementwise_kernel", "softmax_warp_forward"),
        *("cutlass_80_simt_sgemm_128x128_8x4_nt_align1", "ampere_sgemm_128x64_tn"),
    ]
    assert layer["part"] == [None, "scores", "softmax", "softmax", "softmax", "output", None]
    assert layer["start_ns"][0] == 0
    assert [ns / US for ns in layer["duration_ns"]] == [400, 100, 30, 20, 50, 100, 400]


def test_without_kernels_or_marked_layers_there_is_nothing_to_draw(step: Trace) -> None:
    assert timeline(Trace(step.kernels.iloc[:0], step.host, step.ranges, "none"), PHASES) is None
    assert one_layer(step, "backward", (), Names()) is None


INTERVALS = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 30)), min_size=1, max_size=20)


@given(INTERVALS)
def test_busy_until_counts_every_covered_tick_once(intervals: list[tuple[int, int]]) -> None:
    starts = np.array([start for start, _ in intervals], dtype=np.int64)
    ends = starts + np.array([length for _, length in intervals], dtype=np.int64)
    covered = {tick for start, length in intervals for tick in range(start, start + length)}
    moments = np.arange(0, 100, 7, dtype=np.float64)
    expected = [sum(tick < moment for tick in covered) for moment in moments]
    assert busy_until(starts, ends, moments).tolist() == expected
