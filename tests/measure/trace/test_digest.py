"""A trace reduced to kilobytes: nothing that is counted gets lost on the way."""

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


def test_a_section_holds_its_own_run_and_no_other(trace: Trace) -> None:
    forward = section(trace, "mode forward")
    assert forward.kernels["duration_ns"].sum() == FORWARD_US * US
    assert set(forward.ranges["name"]) == {
        *("mode forward", "forward", "layers.0", "layers.1"),
        *("attention", "scores", "softmax", "output"),
    }
    assert (forward.host["kind"] == "synchronize").sum() == 1
    assert sum(len(section(trace, f"mode {m}").kernels) for m in MODES) == len(trace.kernels)


MODES = ("forward", "forward_backward", "train_step")


def test_a_section_that_is_not_there_is_empty(trace: Trace) -> None:
    nothing = section(trace, "mode of another kind")
    assert nothing.kernels.empty
    assert nothing.ranges.empty


def test_phases_add_up_to_the_run(digested: dict[str, Any]) -> None:
    work_us = {row["phase"]: row["total_ns"] / US for row in digested["phases"]}
    assert work_us == {
        "zero_grad": 0,
        "forward": FORWARD_US,
        "backward": BACKWARD_US,
        "optimizer": OPTIMIZER_US,
    }
    assert digested["total_ns"] == sum(row["total_ns"] for row in digested["phases"])
    assert digested["busy_ns"] == digested["total_ns"] == digested["span_ns"]


def test_families_tell_the_optimizer_from_the_model(digested: dict[str, Any]) -> None:
    families = digested["families"]
    assert families["optimizer"] == {"total_ns": OPTIMIZER_US * US, "instances": 3}
    assert families["softmax"]["instances"] == three_modes.LAYERS
    assert sum(row["total_ns"] for row in families.values()) == digested["total_ns"]
    assert sum(row["instances"] for row in families.values()) == digested["kernels"]


def test_the_table_is_nsyss_with_names_by_number(step: Trace) -> None:
    names = Names()
    table = digest(step, PHASES, names)["table"]
    first = {column: values[0] for column, values in table.items()}
    assert names.rows()[first.pop("name")]["name"] == three_modes.SGEMM_BACKWARD
    assert first == {
        "instances": 8,
        "total_ns": 5600 * US,
        "avg_ns": 700 * US,
        "med_ns": 700 * US,
        "min_ns": 700 * US,
        "max_ns": 700 * US,
        "sd_ns": 0.0,
    }
    assert table["total_ns"] == sorted(table["total_ns"], reverse=True)


def test_names_are_kept_whole_and_once() -> None:
    names = Names()
    assert [names.add(name, "short") for name in ("a" * 900, "b", "a" * 900)] == [0, 1, 0]
    assert [len(row["name"]) for row in names.rows()] == [900, 1]


def test_rows_past_the_limit_are_added_up(step: Trace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TABLE_ROWS", 2)
    digested = digest(step, PHASES, Names())
    assert len(digested["table"]["name"]) == 2
    assert digested["rest"]["names"] == 4
    assert sum(digested["table"]["total_ns"]) + digested["rest"]["total_ns"] == digested["total_ns"]
    assert (
        sum(digested["table"]["instances"]) + digested["rest"]["instances"] == digested["kernels"]
    )


def test_copies_stand_outside_the_table(tmp_path: Path) -> None:
    with ExportBuilder(tmp_path / "export.sqlite") as builder:
        builder.range("run", 0, 100)
        builder.call("cudaLaunchKernel", 10, 12, 1)
        builder.kernel("sgemm", 20, 50, 1)
        builder.call("cudaMemcpyAsync", 13, 15, 2)
        builder.memcpy(1, 50, 57, 2)
    digested = digest(section(nsys.read(tmp_path / "export.sqlite"), "run"), [], Names())
    assert digested["copies"] == {"instances": 1, "total_ns": 7}
    assert digested["table"]["total_ns"] == [30]
    assert digested["total_ns"] == 37


def test_the_host_side_says_where_it_waits_and_how_far_it_is_ahead(
    digested: dict[str, Any],
) -> None:
    host = digested["host"]
    assert host["waits"][0]["name"] == "cudaDeviceSynchronize"
    assert host["waits"][0]["after"] == "optimizer"
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
            builder.call("cudaLaunchKernel", start, start + 2, correlation)
            builder.kernel(f"sgemm_{start}", start + 5, start + 50, correlation)
    host = module.host_side(section(nsys.read(tmp_path / "export.sqlite"), "run"))
    assert host["longest_gaps"] == [
        {"gap_ns": 145, "host_late": True, "before": "sgemm_200", "ranges": ["run"]}
    ]
    assert host["gap_ns"] == host["host_late_gap_ns"] == 145


def test_a_slow_range_names_the_run_it_stands_in(tmp_path: Path) -> None:
    with ExportBuilder(tmp_path / "export.sqlite") as builder:
        builder.range("mode a", 0, 2_000_000)
        builder.range("mode b", 2_000_000, 9_000_000)
        for start, end in ((0, 100), (200, 300), (3_000_000, 8_000_000)):
            builder.range("layers.0", start, end)
        builder.call("cudaMalloc", 3_100_000, 7_000_000, 1)
    rows = slow_ranges(nsys.read(tmp_path / "export.sqlite"), ["mode a", "mode b"])
    assert rows == [
        {
            "range": "layers.0",
            "run": "mode b",
            "duration_ns": 5_000_000,
            "median_ns": 100,
            "instances": 3,
            "kernel": None,
            "call": "cudaMalloc",
        }
    ]


def test_a_slow_range_outside_all_runs_names_none(tmp_path: Path) -> None:
    with ExportBuilder(tmp_path / "export.sqlite") as builder:
        for start, end in ((0, 100), (200, 300), (3_000_000, 8_000_000)):
            builder.range("layers.0", start, end)
    assert slow_ranges(nsys.read(tmp_path / "export.sqlite"), ["mode a"])[0]["run"] is None


def test_a_digest_is_plain_json(digested: dict[str, Any]) -> None:
    assert json.loads(json.dumps(digested, allow_nan=False)) == digested
