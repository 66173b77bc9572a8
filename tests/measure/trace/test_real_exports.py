"""Real exports of three versions of nsys, read where LMLAB_NSYS_EXPORTS names their folder."""

import os
import re
from decimal import ROUND_HALF_UP, Decimal
from functools import cache
from pathlib import Path

import pandas as pd
import pytest

from lmlab.measure.trace import digest, nsys
from lmlab.measure.trace.frames import Trace
from lmlab.measure.trace.kernel_names import shorten

FOLDER = os.environ.get("LMLAB_NSYS_EXPORTS", "")

pytestmark = pytest.mark.skipif(
    not (Path(FOLDER) / "small_train_step_A100.sqlite").is_file(),
    reason="LMLAB_NSYS_EXPORTS is not a folder of exports",
)


@cache
def export(name: str) -> Trace:
    return nsys.read(Path(FOLDER) / f"{name}.sqlite")


def without_copies(name: str) -> pd.DataFrame:
    kernels = export(name).kernels
    return kernels[~digest.is_copy(kernels)]


def test_all_kernels_of_a_train_step_are_read_with_their_launches() -> None:
    kernels = without_copies("small_train_step_A100")
    assert (len(kernels), kernels["duration_ns"].sum()) == (3655, 148_043_935)
    assert not kernels["launch_ns"].isna().any()
    optimizer = kernels["family"] == "optimizer"
    assert optimizer.tolist() == ["optimizer step" in path for path in kernels["ranges"]]
    other = kernels.loc[kernels["family"] == "other", "name"]
    assert set(other.map(shorten)) == {"DeviceRadixSortSingleTileKernel"}


PHASES = {
    "forward pass": (632, 43_591_993),
    "backward pass": (1238, 91_969_099),
    "optimizer step": (1776, 11_828_728),
}


def test_phases_own_the_kernels_launched_in_them() -> None:
    for phase, (kernels, total_ns) in PHASES.items():
        rows = digest.within(without_copies("small_train_step_A100"), phase)
        assert (len(rows), rows["duration_ns"].sum()) == (kernels, total_ns)
        assert digest.busy_ns(rows) == total_ns, "one stream: nothing overlaps"


def one_decimal(value: float) -> str:
    """As nsys prints it: halves are rounded away from zero."""
    return str(Decimal(repr(float(value))).quantize(Decimal("0.1"), rounding=ROUND_HALF_UP))


def test_the_kernel_summary_is_nsyss_own_row_by_row() -> None:
    text = (Path(FOLDER) / "cuda_gpu_kern_sum_forward_2.7b_A100.txt").read_text()
    golden = [re.split(r"\s{2,}", line.strip()) for line in text.splitlines() if line[1:2] == " "]
    golden = [row for row in golden if row[0][:1].isdigit()]
    table = digest.kernel_summary(export("forward_2.7b_A100").kernels)
    table["time_percent"] = 100.0 * table["total_ns"] / table["total_ns"].sum()
    shown = ["time_percent", "total_ns", "instances", "avg_ns", "med_ns", "min_ns", "max_ns"]
    table = table[[*shown, "sd_ns", "name"]]
    for column in ("time_percent", "avg_ns", "med_ns", "sd_ns"):
        table[column] = table[column].map(one_decimal)
    # nsys truncates names to a hundred characters.
    table["name"] = [name if len(name) <= 100 else name[:99] + "…" for name in table["name"]]
    assert table.astype(str).to_numpy().tolist() == golden
    assert len(table) == 23


def test_nested_ranges_come_outermost_first() -> None:
    kernels = without_copies("forward_2.7b_nvtx_A100")
    softmax = digest.within(kernels, "computing softmax")
    inner = ("scaled dot product attention", "computing softmax")
    assert set(softmax["ranges"]) == {(outer, *inner) for outer in ("warmup", "benchmark_loop")}
    assert len(softmax) == 5 * 128, "written out: max, subtract, exp, sum, divide"
