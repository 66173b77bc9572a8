"""A trace reduced to kilobytes: everything that is counted adds up."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lmlab.measure.trace import digest as module
from lmlab.measure.trace import nsys
from lmlab.measure.trace.digest import Names, digest, section, slow_ranges
from lmlab.measure.trace.frames import Trace
from tests.measure.trace import three_modes
from tests.measure.trace.export_builder import ExportBuilder
from tests.measure.trace.three_modes import BACKWARD_US, FORWARD_US, OPTIMIZER_US, US, write_export

MODES = ("forward", "forward_backward", "train_step")
PHASES = ("zero_grad", "forward", "backward", "optimizer")


@pytest.fixture
def trace(tmp_path: Path) -> Trace:
    write_export(tmp_path / "export.sqlite")
    return nsys.read(tmp_path / "export.sqlite")


@pytest.fixture
def step(trace: Trace) -> Trace:
    return section(trace, "mode train_step")


@pytest.fixture
def digested(step: Trace) -> dict[str, Any]:
    return digest(step, PHASES, Names())


def test_a_section_holds_one_run(trace: Trace) -> None:
    forward = section(trace, "mode forward")
    assert forward.kernels["duration_ns"].sum() == FORWARD_US * US
    assert set(forward.ranges["name"]) == {
        *("mode forward", "forward", "layers.0", "layers.1"),
        *("attention", "scores", "softmax", "output"),
    }
    assert (forward.host["kind"] == "synchronize").sum() == 1
    assert sum(len(section(trace, f"mode {m}").kernels) for m in MODES) == len(trace.kernels)
    missing = section(trace, "no such mode")
    assert (len(missing.kernels), len(missing.host), len(missing.ranges)) == (0, 0, 0)
    assert digest(missing, PHASES, Names())["total_ns"] == 0


def test_phases_and_families_add_up_to_the_run(digested: dict[str, Any]) -> None:
    assert {row["phase"]: row["total_ns"] / US for row in digested["phases"]} == {
        "zero_grad": 0,
        "forward": FORWARD_US,
        "backward": BACKWARD_US,
        "optimizer": OPTIMIZER_US,
    }
    assert digested["total_ns"] == sum(row["total_ns"] for row in digested["phases"])
    assert digested["busy_ns"] == digested["total_ns"] == digested["span_ns"]
    families = digested["families"]
    assert families["optimizer"] == {"total_ns": OPTIMIZER_US * US, "instances": 3}
    assert families["softmax"]["instances"] == three_modes.LAYERS
    assert sum(row["total_ns"] for row in families.values()) == digested["total_ns"]
    assert sum(row["instances"] for row in families.values()) == digested["kernels"]
    assert json.loads(json.dumps(digested, allow_nan=False)) == digested


def test_the_table_refers_to_names_by_index(step: Trace) -> None:
    names = Names()
    table = digest(step, PHASES, names)["table"]
    first = {column: values[0] for column, values in table.items()}
    assert names.rows()[first.pop("name")]["name"] == three_modes.SGEMM_BACKWARD
    assert first == {
        "instances": 8,
        "total_ns": 5600 * US,
        **dict.fromkeys(("avg_ns", "med_ns", "min_ns", "max_ns"), 700 * US),
        "sd_ns": 0.0,
    }
    assert table["total_ns"] == sorted(table["total_ns"], reverse=True)
    assert names.add(three_modes.SGEMM_BACKWARD, "again") == table["name"][0]


def test_rows_beyond_the_limit_are_summed(step: Trace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TABLE_ROWS", 2)
    digested = digest(step, PHASES, Names())
    table, rest = digested["table"], digested["rest"]
    assert (len(table["name"]), rest["names"]) == (2, 4)
    assert sum(table["total_ns"]) + rest["total_ns"] == digested["total_ns"]
    assert sum(table["instances"]) + rest["instances"] == digested["kernels"]


def test_the_table_has_statistics_by_name_and_no_copies(tmp_path: Path) -> None:
    with ExportBuilder(tmp_path / "export.sqlite") as builder:
        builder.range("run", 0, 1000)
        for correlation, (name, duration) in enumerate(
            [("sgemm", 10), ("sgemm", 20), ("sgemm", 60), ("b", 5), ("a", 5)]
        ):
            start = 100 * correlation
            builder.launched(name, start + 10, start + 20, start + 20 + duration, correlation)
        builder.call("cudaMemcpyAsync", 13, 15, 9)
        builder.memcpy(1, 950, 957, 9)
    names = Names()
    digested = digest(section(nsys.read(tmp_path / "export.sqlite"), "run"), [], names)
    assert digested["copies"] == {"instances": 1, "total_ns": 7}
    assert digested["total_ns"] == 107
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


def test_the_host_side_has_waits_launches_and_how_far_the_host_is_ahead(
    digested: dict[str, Any],
) -> None:
    host = digested["host"]
    assert (host["waits"][0]["name"], host["waits"][0]["after"]) == (
        "cudaDeviceSynchronize",
        "optimizer",
    )
    assert host["wait_ns"] == host["waits"][0]["duration_ns"] > 5000 * US
    assert host["delay_max_ns"] > host["delay_median_ns"] > 1000 * US
    assert host["launches"] == digested["kernels"]
    assert (host["gap_ns"], host["gaps"], host["longest_gaps"]) == (0, 0, [])
    calls = {call["name"]: call["calls"] for call in host["calls"]}
    assert calls == {"cudaDeviceSynchronize": 1, "cudaLaunchKernel": digested["kernels"]}


def test_a_gap_names_the_kernel_that_came_late(tmp_path: Path) -> None:
    with ExportBuilder(tmp_path / "export.sqlite") as builder:
        builder.range("run", 0, 900)
        for correlation, start in enumerate((10, 200)):
            builder.launched(f"sgemm_{start}", start, start + 5, start + 50, correlation)
    host = module.host_side(section(nsys.read(tmp_path / "export.sqlite"), "run"))
    assert host["longest_gaps"] == [
        {"gap_ns": 145, "host_late": True, "before": "sgemm_200", "ranges": ["run"]}
    ]
    assert host["gap_ns"] == host["host_late_gap_ns"] == 145


def test_a_slow_range_names_its_run(tmp_path: Path) -> None:
    with ExportBuilder(tmp_path / "export.sqlite") as builder:
        builder.range("mode b", 2_000_000, 9_000_000)
        for start, end in ((0, 100), (200, 300), (3_000_000, 8_000_000)):
            builder.range("layers.0", start, end)
        builder.call("cudaMalloc", 3_100_000, 7_000_000, 1)
    trace = nsys.read(tmp_path / "export.sqlite")
    expected = {
        "range": "layers.0",
        "run": "mode b",
        "duration_ns": 5_000_000,
        "median_ns": 100,
        "instances": 3,
        "kernel": None,
        "call": "cudaMalloc",
    }
    assert slow_ranges(trace, ["mode a", "mode b"]) == [expected]
    assert slow_ranges(trace, ["mode a"]) == [expected | {"run": None}]
