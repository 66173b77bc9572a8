"""Tables of the profile chapter: the tool named, statuses in cells, nothing left out silently."""

from __future__ import annotations

from typing import Any

import pytest

from lmlab.study.points import Point
from lmlab.study.results import Result
from lmlab.writeup.table import Table
from lmlab.writeup.tables.profile import tables
from tests.writeup import factory, synthetic
from tests.writeup.small_profile import SIMT, collected, nothing, recording


def cell(table: Table, column: str, row: int = 0) -> str:
    titles = [each.title for each in table.columns]
    return table.rows[row][titles.index(column)]


@pytest.fixture(scope="module")
def small() -> dict[str, Table]:
    return tables(collected(end_to_end=synthetic.end_to_end))


def test_a_row_has_a_cell_for_every_column(small: dict[str, Table]) -> None:
    for name, table in small.items():
        assert {len(row) for row in table.rows} == {len(table.columns)}, name


def test_the_tool_stands_under_every_table(small: dict[str, Table]) -> None:
    for name, table in small.items():
        assert "recorded by torch profiler 2.13.0" in table.caption, name


def test_two_tools_are_told_apart() -> None:
    def make(point: Point) -> Result:
        by_nsys = point.parameters["size"] == "small"
        return recording(point, tool="nsys 2025.3.1" if by_nsys else "torch profiler 2.13.0")

    made = tables(collected(make))
    assert "nsys 2025.3.1 (2 points) and torch profiler 2.13.0 (2 points)" in made["top"].caption
    assert made["kernels_small_forward"].caption.endswith("recorded by nsys 2025.3.1.")


def test_only_the_clocks_table_speaks_of_a_clock(small: dict[str, Table]) -> None:
    assert "synchronised host clock, n = 3" in small["clock"].caption
    assert all("host clock" not in small[name].caption for name in small if name != "clock")


def test_clock_and_timeline_stand_side_by_side(small: dict[str, Table]) -> None:
    clock = small["clock"]
    assert cell(clock, "Timeline (ms)") == "10.0"
    assert cell(clock, "GPU busy (ms)") == "10.0"
    assert cell(clock, "Timeline / clock") == "0.952×"
    assert cell(clock, "Busy / clock") == "95.2 %"
    assert cell(clock, "Clock / end to end").endswith("×")
    assert "a ratio across points" in clock.caption
    assert any("mode~forward" in source for source in clock.sources)


def test_without_the_other_chapter_the_ratio_says_so() -> None:
    assert cell(tables(collected())["clock"], "Clock / end to end") == "not measured"


def test_the_host_table_says_where_it_waits() -> None:
    step = {"wait": (20.0, "cudaDeviceSynchronize", "optimizer"), "late_ms": 3.4}
    table = tables(collected(lambda p: recording(p, step=step)))["host"]
    assert (
        cell(table, "Host waits at the end (ms)") == "20.0 in cudaDeviceSynchronize after optimizer"
    )
    assert cell(table, "Host-bound share") == "10 %"
    assert cell(tables(collected())["host"], "Host waits at the end (ms)") == "nowhere"
    assert cell(table, "Launch, mean (µs)") == "–"


def test_slow_ranges_have_a_table_only_where_there_are_some() -> None:
    row = {
        "range": "layers.0", "run": "mode train_step", "duration_ns": 9_000_000,
        "median_ns": 1_000_000, "instances": 3, "kernel": None, "call": "cudaMalloc",
    }  # fmt: skip
    made = tables(collected(lambda p: recording(p, slow_ranges=[row])))
    assert cell(made["slow_ranges"], "Of its median") == "9.0×"
    assert cell(made["slow_ranges"], "Run") == "train step"
    assert cell(made["slow_ranges"], "Most device time in it") == "–"
    assert "slow_ranges" not in tables(collected())


def test_the_top_kernel_is_followed_through_the_modes(small: dict[str, Table]) -> None:
    top = small["top"]
    assert cell(top, "Kernel with most time in forward") == SIMT
    assert cell(top, "Calls a pass") == "85"
    assert cell(top, "Share, forward") == "80.0 %"
    assert cell(top, "Share, forward and backward") == "82.8 %"
    assert cell(top, "Share, train step") == "70.6 %"


def test_a_top_kernel_that_another_mode_lacks_has_no_share_there() -> None:
    def make(point: Point) -> Result:
        result = recording(point)
        modes: dict[str, Any] = dict(result.data["modes"])
        modes["train_step"] = modes["forward_backward"] = {
            **modes["train_step"],
            "table": {key: values[1:] for key, values in modes["train_step"]["table"].items()},
        }
        return factory.result(
            point, measurements=result.measurements, data={**result.data, "modes": modes}
        )

    assert cell(tables(collected(make))["top"], "Share, train step") == "–"


def test_full_tables_are_of_the_largest_context_of_each_size(small: dict[str, Table]) -> None:
    full = [name for name in small if name.startswith("kernels_")]
    assert len(full) == 2 * 3
    table = small["kernels_small_train_step"]
    assert table.title == "All kernels of a train step: small at context 256"
    assert [column.title for column in table.columns] == [
        *("Time (%)", "Total (ms)", "Instances", "Avg (µs)", "Med (µs)", "Min (µs)", "Max (µs)"),
        *("SD (µs)", "Name"),
    ]
    assert table.rows[0] == ["70.6", "24.0", "255", *["94.1"] * 4, "0", SIMT]


def test_what_a_full_table_leaves_out_is_its_last_row() -> None:
    rest = {"names": 7, "instances": 1200, "total_ns": 10_000_000}

    def make(point: Point) -> Result:
        result = recording(point)
        modes = {mode: {**run, "rest": rest} for mode, run in result.data["modes"].items()}
        return factory.result(
            point, measurements=result.measurements, data={**result.data, "modes": modes}
        )

    last = tables(collected(make))["kernels_small_forward"].rows[-1]
    assert last == ["50.0", "10.0", "1,200", *["–"] * 5, "7 more kernels, added up"]


def test_other_kernels_are_no_products(small: dict[str, Table]) -> None:
    families = {cell(small["others"], "Family", row) for row in range(len(small["others"].rows))}
    assert families == {"softmax", "elementwise", "reduction"}


def test_families_follow_from_forward_to_train_step(small: dict[str, Table]) -> None:
    assert cell(small["families"], "Matmul, forward") == "80 %"
    assert cell(small["families"], "Matmul, train step") == "71 %"
    assert cell(small["families"], "Optimizer, train step") == "15 %"


def test_cores_are_told_from_the_names(small: dict[str, Table]) -> None:
    assert cell(small["cores"], "On SIMT cores") == "100 %"
    assert cell(small["cores"], "On tensor cores") == "0 %"
    assert cell(small["cores"], "Longest of them") == SIMT


def test_a_run_without_products_has_no_cores() -> None:
    other = [("elementwise add", 1.0, 1)]
    table = tables(collected(lambda p: recording(p, forward=other, backward=other)))["cores"]
    assert cell(table, "On SIMT cores") == cell(table, "Longest of them") == "–"


def test_attention_has_time_flops_bytes_and_rates(small: dict[str, Table]) -> None:
    assert cell(small["parts"], "Softmax / products, time") == "0.500×"
    assert cell(small["parts"], "Softmax / products, FLOPs") == "0.0195×"
    detail = small["attention_small"]
    assert detail.rows[2] == [
        *("128", "softmax", "1.00", "25 %", "0.156", "20.0", "0.156", "20.0", "7.81")
    ]
    assert [column.title for column in detail.columns][4:7] == ["GFLOPs", "MB moved", "TFLOP/s"]


def test_attention_without_parts_and_without_a_count_says_so() -> None:
    whole = tables(collected(lambda p: recording(p, parts=None)))
    assert cell(whole["parts"], "Scores QKᵀ (ms)") == "no parts"
    uncounted = tables(collected(lambda p: recording(p, attention_cost=None)))
    assert cell(uncounted["parts"], "Softmax / products, FLOPs") == "–"
    assert uncounted["attention_small"].rows[0][4] == "not counted"


def test_a_point_that_did_not_run_shows_its_status() -> None:
    def make(point: Point) -> Result:
        if point.parameters["context"] == 256:
            return factory.failed(point, "oom", "asked for 9 GiB")
        return recording(point)

    made = tables(collected(make))
    for name in ("clock", "host", "top", "families", "cores", "parts"):
        assert made[name].rows[1][2:] == ["OOM", *["–"] * (len(made[name].columns) - 3)], name
    assert made["kernels_small_forward"].title.endswith("small at context 128")


def test_nothing_measured_gives_tables_that_say_so() -> None:
    made = tables(collected(nothing))
    assert cell(made["top"], "Kernel with most time in forward") == "not measured"
    assert made["top"].caption.startswith("Nothing recorded.")
    assert made["clock"].caption == "Nothing measured."


def test_a_cpu_has_operators_and_neither_host_nor_cores() -> None:
    made = tables(collected(lambda p: recording(p, "cpu"), "cpu", sizes=["cpu-small"]))
    assert not {"host", "cores"} & set(made)
    assert made["top"].title == "The operator with the most cumulative time"
    assert "Operators busy (ms)" in [column.title for column in made["clock"].columns]


def test_batches_and_precisions_are_columns_where_they_vary() -> None:
    made = tables(collected(batches=[1, 4], precisions=["fp32", "tf32"], sizes=["small"]))
    titles = [column.title for column in made["top"].columns]
    assert titles[:4] == ["Size", "Context", "Batch", "Precision"]
    assert len(made["top"].rows) == 2 * 2 * 2
