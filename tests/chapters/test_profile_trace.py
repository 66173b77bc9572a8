"""From an nsys export to records and data, and the result that they complete."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lmlab.chapters.profile.trace_data import PHASES_OF_MODE, TOTAL, complete, mode_range, of_export
from lmlab.measure.records import Record, value
from lmlab.measure.trace.digest import TABLE_ROWS
from lmlab.measure.trace.frames import TraceError
from lmlab.study.results import SIZE_LIMIT_BYTES, ResultError, read
from tests.measure.trace.export_builder import ExportBuilder
from tests.measure.trace.three_modes import BACKWARD_US, FORWARD_US, OPTIMIZER_US, write_export
from tests.report.study import result

MEASURED = result({"size": "small"}, [value("tokens", 16, "")], chapter="profile")


@pytest.fixture
def export(tmp_path: Path) -> Path:
    write_export(tmp_path / "export.sqlite")
    return tmp_path / "export.sqlite"


def values(records: list[Record], quantity: str, **labels: Any) -> list[Any]:
    """Values of a quantity, times in microseconds, where these labels agree."""
    return [
        round(record["value"] * 1000, 6) if record["unit"] == "ms" else record["value"]
        for record in records
        if record["quantity"] == quantity and labels.items() <= record["labels"].items()
    ]


def test_every_mode_has_its_own_work_and_kernels_by_rank(export: Path) -> None:
    records, _ = of_export(export)
    step_us = FORWARD_US + BACKWARD_US + OPTIMIZER_US
    by_mode = [values(records, "total_time", mode=mode, phase=TOTAL) for mode in PHASES_OF_MODE]
    assert by_mode == [[FORWARD_US], [FORWARD_US + BACKWARD_US], [step_us]]
    assert values(records, "total_time", mode="train_step", phase="optimizer") == [OPTIMIZER_US]
    assert values(records, "kernel_total_time", mode="forward", rank=1) == [4 * 400]
    assert values(records, "kernel_instances", mode="forward", rank=1) == [4]
    assert values(records, "launches", mode="forward") == [14]
    assert values(records, "launch_time", mode="forward") == [5]


def test_attention_is_cut_at_its_matmuls_and_its_softmax(export: Path) -> None:
    records, data = of_export(export)
    parts = ("scores", "scale_and_mask", "softmax", "output")
    for name, expected in (("total", [200, 100, 100, 200]), ("product", [200, 0, 0, 200])):
        found = [values(records, f"part_{name}_time", part=part) for part in parts]
        assert found == [[us] for us in expected]
    kernels = {part["part"]: part["names"] for part in data["attention_parts"]}
    (softmax,) = kernels["softmax"]
    assert data["names"][softmax]["short_name"] == "softmax_warp_forward"


def test_the_largest_other_kernels_have_records_at_any_rank(tmp_path: Path) -> None:
    with ExportBuilder(tmp_path / "export.sqlite") as builder:
        for number, mode in enumerate(PHASES_OF_MODE):
            start = 10_000_000 * number
            builder.range(mode_range(mode), start, start + 9_000_000)
            names = [f"{'n' * 450}_{i}_sgemm" for i in range(2 * TABLE_ROWS)]
            names[40:48] = [f"softmax_{i}_{mode}" for i in range(8)]
            for index, name in enumerate(names):
                launch, correlation = start + 1000 * index, 1000 * number + index
                builder.call("cudaLaunchKernel", launch, launch + 5, correlation)
                builder.kernel(name, launch + 10, launch + 900 - index, correlation)
    records, data = of_export(tmp_path / "export.sqlite")
    ranks = [
        record["labels"]["rank"]
        for record in records
        if record["quantity"] == "kernel_instances" and record["labels"]["mode"] == "forward"
    ]
    assert ranks == [*range(1, 11), *range(41, 46)]
    assert values(records, "part_total_time") == []
    assert data["modes"]["train_step"]["rest"]["names"] == TABLE_ROWS
    assert len(json.dumps([records, data], allow_nan=False)) < 0.9 * SIZE_LIMIT_BYTES


def test_a_trace_without_kernels_is_one_line(tmp_path: Path) -> None:
    with ExportBuilder(tmp_path / "export.sqlite") as builder:
        builder.range(mode_range("forward"), 0, 100)
    with pytest.raises(TraceError, match=r"nsys 2025.3.1.90 recorded no kernels in 'mode forward'"):
        of_export(tmp_path / "export.sqlite")


def test_the_report_completes_what_the_process_measured(tmp_path: Path, export: Path) -> None:
    MEASURED.write(tmp_path / "measured.json")
    complete(tmp_path / "measured.json", export, tmp_path / "out.json")
    completed, (records, data) = read(tmp_path / "out.json"), of_export(export)
    assert completed.measurements == (*MEASURED.measurements, *records)
    assert completed.data == data
    assert values(records, "profiler_version") == ["nsys 2025.3.1.90"]
    assert completed.code_fingerprint == MEASURED.code_fingerprint


def test_a_point_without_numbers_needs_no_report(tmp_path: Path) -> None:
    failed = replace(MEASURED, status="oom", reason="needs 9 GiB more", measurements=())
    failed.write(tmp_path / "measured.json")
    complete(tmp_path / "measured.json", tmp_path / "no export", tmp_path / "out.json")
    assert read(tmp_path / "out.json") == failed


@pytest.mark.parametrize("missing", ["measured", "export"])
def test_a_missing_half_is_one_line_and_no_result(
    tmp_path: Path, export: Path, missing: str
) -> None:
    paths = {"measured": tmp_path / "measured.json", "export": export}
    MEASURED.write(paths["measured"])
    paths[missing].unlink()
    with pytest.raises((TraceError, ResultError), match=r"does not exist|not a readable"):
        complete(**paths, out=tmp_path / "out.json")
    assert not (tmp_path / "out.json").exists()
