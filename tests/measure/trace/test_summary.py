"""Tables over kernels: nsys's summary, shares of families, totals of ranges."""

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
                builder.call("cudaLaunchKernel", moment + 50, moment + 51, correlation)
                builder.kernel(name, moment + 60, moment + 60 + duration, correlation)
                moment, correlation = moment + 1000, correlation + 1
        builder.memcpy(1, moment, moment + 500, 999)
    return nsys.read(builder.path).kernels


def test_the_summary_has_one_row_a_name_most_time_first(kernels: pd.DataFrame) -> None:
    table = summary.kernel_summary(summary.without_copies(kernels))
    assert tuple(table.columns) == summary.SUMMARY_COLUMNS
    assert table[["name", "total_ns", "instances", "family"]].to_numpy().tolist() == [
        ["ampere_sgemm_32x32_nn", 90, 3, "matmul_simt"],
        ["reduce_kernel", 33, 1, "reduction"],
        ["elementwise_kernel", 17, 3, "elementwise"],
    ]


def test_a_printed_row_has_nsyss_statistics(kernels: pd.DataFrame) -> None:
    table = summary.as_nsys_prints(summary.kernel_summary(summary.without_copies(kernels)))
    # 90 of 140; mean 30, median 20, sample deviation of 10, 20, 60.
    assert table.iloc[0].tolist() == (
        ["64.3", "90", "3", "30.0", "20.0", "10", "60", "26.5", "ampere_sgemm_32x32_nn"]
    )
    assert table.iloc[1]["StdDev (ns)"] == "0.0", "one instance deviates from nothing"


def test_kernels_of_equal_time_come_in_order_of_name(kernels: pd.DataFrame) -> None:
    twins = kernels[kernels["duration_ns"].isin([5, 7])].assign(duration_ns=4)
    twins["name"] = ["b", "a", "c"]
    assert summary.kernel_summary(twins)["name"].tolist() == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("value", "printed"),
    [
        (0.25, "0.3"),
        (0.35, "0.4"),
        (2.05, "2.1"),
        (185344.5, "185344.5"),
        (7, "7.0"),
        (-0.25, "-0.3"),
    ],
)
def test_halves_are_rounded_away_from_zero(value: float, printed: str) -> None:
    assert summary.one_decimal(value) == printed


def test_the_top_kernel_is_the_first_row(kernels: pd.DataFrame) -> None:
    top = summary.top_kernel(summary.within(kernels, "softmax"))
    assert top is not None
    assert (top["name"], top["instances"], top["time_percent"]) == ("elementwise_kernel", 2, 100.0)


def test_without_kernels_there_is_no_top_and_no_row(kernels: pd.DataFrame) -> None:
    nothing = summary.within(kernels, "no such range")
    assert summary.top_kernel(nothing) is None
    assert summary.kernel_summary(nothing).empty
    assert summary.family_totals(nothing).empty
    assert summary.range_totals(nothing, ["forward"]).to_numpy().tolist() == [["forward", 0, 0]]


def test_shares_of_families_add_up_to_one(kernels: pd.DataFrame) -> None:
    table = summary.family_totals(summary.without_copies(kernels))
    assert table[["family", "total_ns", "instances"]].to_numpy().tolist() == [
        ["matmul_simt", 90, 3],
        ["elementwise", 10, 2],
        ["reduction", 33, 1],
        ["optimizer", 7, 1],
    ]
    assert table["share"].sum() == pytest.approx(1.0)


def test_a_kernel_counts_in_every_range_that_it_stands_in(kernels: pd.DataFrame) -> None:
    assert summary.range_totals(kernels).to_numpy().tolist() == [
        ["forward", 5, 100],
        ["softmax", 2, 10],
        ["optimizer", 1, 7],
    ]


def test_asked_for_ranges_come_in_the_order_asked_for(kernels: pd.DataFrame) -> None:
    asked = summary.range_totals(kernels, ["optimizer", "loss", "forward"])
    assert asked["kernels"].tolist() == [1, 0, 5]


def test_what_is_no_product_can_be_looked_at_alone(kernels: pd.DataFrame) -> None:
    forward = summary.without_matmuls(summary.within(kernels, "forward"))
    assert set(forward["name"]) == {"elementwise_kernel"}
