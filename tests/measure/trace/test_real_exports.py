"""Real exports of three versions of nsys, read where LMLAB_NSYS_EXPORTS names their folder."""

from __future__ import annotations

import os
import re
from functools import cache
from pathlib import Path

import pytest

from lmlab.measure.trace import gpu_time, nsys, summary
from lmlab.measure.trace.frames import Trace

FOLDER = os.environ.get("LMLAB_NSYS_EXPORTS", "")

pytestmark = pytest.mark.skipif(
    not (Path(FOLDER) / "small_train_step_A100.sqlite").is_file(),
    reason="LMLAB_NSYS_EXPORTS names no folder of exports",
)


@cache
def export(name: str) -> Trace:
    return nsys.read(Path(FOLDER) / f"{name}.sqlite")


def test_all_kernels_of_a_train_step_are_there() -> None:
    kernels = summary.without_copies(export("small_train_step_A100").kernels)
    assert (len(kernels), kernels["duration_ns"].sum()) == (3655, 148_043_935)
    assert not kernels["launch_ns"].isna().any()


def test_phases_own_the_kernels_that_were_launched_in_them() -> None:
    kernels = summary.without_copies(export("small_train_step_A100").kernels)
    phases = ["forward pass", "backward pass", "optimizer step"]
    assert summary.range_totals(kernels, phases).to_numpy().tolist() == [
        ["forward pass", 632, 43_591_993],
        ["backward pass", 1238, 91_969_099],
        ["optimizer step", 1776, 11_828_728],
    ]


@pytest.mark.parametrize(
    ("phase", "name", "total_ns", "instances"),
    [
        ("forward pass", "ampere_sgemm_128x32_tn", 13_653_179, 24),
        ("backward pass", "ampere_sgemm_64x32_sliced1x4_nt", 21_023_800, 72),
    ],
)
def test_the_top_kernel_of_a_phase(phase: str, name: str, total_ns: int, instances: int) -> None:
    kernels = summary.without_copies(export("small_train_step_A100").kernels)
    top = summary.top_kernel(summary.within(kernels, phase))
    assert top is not None
    assert (top["name"], top["total_ns"], top["instances"]) == (name, total_ns, instances)


def test_backward_takes_about_twice_forward_and_differs_from_it() -> None:
    trace = export("small_train_step_A100")
    times = gpu_time.phase_times(trace, ["forward pass", "backward pass"])
    assert 1.5 < times["busy_ns"][1] / times["busy_ns"][0] < 3.0
    assert (times["total_ns"] == times["busy_ns"]).all(), "one stream: nothing overlaps"


def test_the_plain_optimizer_is_told_from_the_model() -> None:
    kernels = export("small_train_step_A100").kernels
    by_range = summary.within(kernels, "optimizer step")
    assert set(by_range["family"]) == {"optimizer"}
    assert set(kernels.loc[kernels["family"] == "optimizer"].index) == set(by_range.index)


def test_the_host_waits_after_the_optimizer() -> None:
    waits = gpu_time.waits(export("small_train_step_A100"))
    assert waits[["name", "after"]].to_numpy().tolist() == [
        ["cudaDeviceSynchronize", "optimizer step"]
    ]


def test_every_family_of_a_train_step_is_recognised() -> None:
    kernels = export("small_train_step_A100").kernels
    unknown = kernels.loc[kernels["family"] == "other", "short_name"]
    assert set(unknown) == {"DeviceRadixSortSingleTileKernel"}


def golden_rows() -> list[list[str]]:
    """The table that nsys itself printed of the same report; its columns are two spaces apart."""
    text = (Path(FOLDER) / "cuda_gpu_kern_sum_forward_2.7b_A100.txt").read_text()
    rows = [line.strip() for line in text.splitlines() if re.match(r"\s+\d", line)]
    return [re.split(r"\s{2,}", row) for row in rows]


def test_the_kernel_summary_is_nsyss_own_row_by_row() -> None:
    kernels = summary.without_copies(export("forward_2.7b_A100").kernels)
    table = summary.as_nsys_prints(summary.kernel_summary(kernels))
    # nsys cuts names at a hundred characters.
    table["Name"] = [name if len(name) <= 100 else name[:99] + "…" for name in table["Name"]]
    assert table.to_numpy().tolist() == golden_rows()
    assert len(table) == 23


def test_an_export_without_ranges_has_kernels_in_none() -> None:
    trace = export("forward_2.7b_A100")
    assert trace.ranges.empty
    assert set(trace.kernels["ranges"]) == {()}


def test_nested_ranges_come_outermost_first() -> None:
    kernels = summary.without_copies(export("forward_2.7b_nvtx_A100").kernels)
    softmax = summary.within(kernels, "computing softmax")
    assert {path[1:] for path in softmax["ranges"]} == {
        ("scaled dot product attention", "computing softmax")
    }
    assert {path[0] for path in softmax["ranges"]} == {"warmup", "benchmark_loop"}
    assert len(softmax) == 5 * 128, "written out: max, subtract, exp, sum, divide"
