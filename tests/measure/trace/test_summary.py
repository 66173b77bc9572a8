"""Tables over kernels: the kernel summary and the totals of families."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from lmlab.measure.trace import nsys, summary
from tests.measure.trace.export_builder import ExportBuilder

# name, ranges around its launch, durations
LAUNCHES = [
    ("ampere_sgemm_32x32_nn", ("forward",), [10, 20, 60]),
    ("elementwise_kernel", ("forward", "softmax"), [5, 5]),
    ("elementwise_kernel", ("optimizer",), [7]),
    ("reduce_kernel", (), [33]),
]


@pytest.fixture
def kernels(tmp_path: Path) -> pd.DataFrame:
    moment = correlation = 0
    with ExportBuilder(tmp_path / "export.sqlite") as builder:
        for name, path, durations in LAUNCHES:
            for duration in durations:
                for depth, range_name in enumerate(path):
                    builder.range(range_name, moment + depth, moment + 100 - depth)
                builder.launched(
                    name, moment + 50, moment + 60, moment + 60 + duration, correlation
                )
                moment, correlation = moment + 1000, correlation + 1
        builder.memcpy(1, moment, moment + 500, 999)
    return nsys.read(builder.path).kernels


def test_the_summary_has_one_row_per_name_largest_total_first(kernels: pd.DataFrame) -> None:
    table = summary.kernel_summary(summary.without_copies(kernels))
    assert tuple(table.columns) == summary.SUMMARY_COLUMNS
    assert table[["name", "total_ns", "instances", "family"]].to_numpy().tolist() == [
        ["ampere_sgemm_32x32_nn", 90, 3, "matmul_simt"],
        ["reduce_kernel", 33, 1, "reduction"],
        ["elementwise_kernel", 17, 3, "elementwise"],
    ]
    first = table.iloc[0]
    assert (first["avg_ns"], first["med_ns"], first["min_ns"], first["max_ns"]) == (30, 20, 10, 60)
    assert first["time_percent"] == pytest.approx(100 * 90 / 140)
    assert first["sd_ns"] == pytest.approx(26.4575, abs=1e-4), "sample deviation of 10, 20, 60"
    assert table["sd_ns"][1] == 0.0, "one instance has no deviation"


def test_kernels_of_equal_time_come_in_order_of_name(kernels: pd.DataFrame) -> None:
    twins = kernels[kernels["duration_ns"].isin([5, 7])].assign(duration_ns=4)
    twins["name"] = ["b", "a", "c"]
    assert summary.kernel_summary(twins)["name"].tolist() == ["a", "b", "c"]


def test_a_kernel_counts_in_every_range_around_its_launch(kernels: pd.DataFrame) -> None:
    totals = {
        name: int(summary.within(kernels, name)["duration_ns"].sum())
        for name in ("forward", "softmax", "optimizer", "loss")
    }
    assert totals == {"forward": 100, "softmax": 10, "optimizer": 7, "loss": 0}


def test_without_kernels_every_table_is_empty(kernels: pd.DataFrame) -> None:
    nothing = summary.within(summary.within(kernels, "no such range"), "softmax")
    assert list(nothing.columns) == list(kernels.columns)
    assert summary.kernel_summary(nothing).empty
    assert summary.family_totals(nothing).empty


def test_families_come_in_a_fixed_order(kernels: pd.DataFrame) -> None:
    table = summary.family_totals(summary.without_copies(kernels)).reset_index()
    assert table.to_numpy().tolist() == [
        ["matmul_simt", 90, 3],
        ["elementwise", 10, 2],
        ["reduction", 33, 1],
        ["optimizer", 7, 1],
    ]
