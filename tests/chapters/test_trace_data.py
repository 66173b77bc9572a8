"""From an export to the data of a result: three modes, attention's parts, all of it plain JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lmlab.chapters.profile.trace_data import PHASES_OF_MODE, mode_range, of_export
from lmlab.measure.trace.digest import TABLE_ROWS
from lmlab.measure.trace.frames import TraceError
from lmlab.study.results import SIZE_LIMIT_BYTES
from tests.measure.trace.export_builder import ExportBuilder
from tests.measure.trace.three_modes import BACKWARD_US, FORWARD_US, OPTIMIZER_US, US, write_export


@pytest.fixture
def data(tmp_path: Path) -> dict[str, Any]:
    write_export(tmp_path / "export.sqlite")
    return of_export(tmp_path / "export.sqlite")


def test_every_mode_has_its_own_work(data: dict[str, Any]) -> None:
    assert {mode: digest["total_ns"] // US for mode, digest in data["modes"].items()} == {
        "forward": FORWARD_US,
        "forward_backward": FORWARD_US + BACKWARD_US,
        "train_step": FORWARD_US + BACKWARD_US + OPTIMIZER_US,
    }


def test_attention_is_cut_into_products_softmax_and_what_lies_between(
    data: dict[str, Any],
) -> None:
    parts = {row["part"]: row for row in data["attention_parts"]}
    assert {part: row["total_ns"] // US for part, row in parts.items()} == {
        "scores": 200,
        "scale_and_mask": 100,
        "softmax": 100,
        "output": 200,
    }
    assert parts["scores"]["product_ns"] == parts["scores"]["total_ns"]
    assert parts["softmax"]["product_ns"] == 0
    named = [data["names"][index]["short_name"] for index in parts["softmax"]["names"]]
    assert named == ["softmax_warp_forward"]


def test_the_tool_is_the_one_that_wrote_the_export(data: dict[str, Any]) -> None:
    assert data["tool"] == "nsys 2025.3.1.90"


def test_a_mode_is_told_from_a_phase_of_the_same_name() -> None:
    phases = {phase for phases in PHASES_OF_MODE.values() for phase in phases}
    assert not phases & {mode_range(mode) for mode in PHASES_OF_MODE}


def test_the_data_are_plain_json_of_a_few_kilobytes(data: dict[str, Any]) -> None:
    text = json.dumps(data, allow_nan=False)
    assert json.loads(text) == data
    assert len(text) < 20_000


def test_an_attention_without_products_of_its_own_has_no_parts(tmp_path: Path) -> None:
    with ExportBuilder(tmp_path / "export.sqlite") as builder:
        for number, mode in enumerate(PHASES_OF_MODE):
            start = 1000 * number
            builder.range(mode_range(mode), start, start + 900)
            builder.range("attention", start, start + 500)
            builder.call("cudaLaunchKernel", start + 10, start + 15, number)
            builder.kernel("flash_fwd_kernel", start + 20, start + 90, number)
    assert of_export(tmp_path / "export.sqlite")["attention_parts"] is None


def test_a_trace_without_kernels_is_one_line(tmp_path: Path) -> None:
    with ExportBuilder(tmp_path / "export.sqlite") as builder:
        builder.range(mode_range("forward"), 0, 100)
    with pytest.raises(TraceError, match=r"nsys 2025.3.1.90 recorded no kernels in 'mode forward'"):
        of_export(tmp_path / "export.sqlite")


def test_the_longest_tables_of_the_longest_names_fit_into_a_result(tmp_path: Path) -> None:
    with ExportBuilder(tmp_path / "export.sqlite") as builder:
        for number, mode in enumerate(PHASES_OF_MODE):
            start = 10_000_000 * number
            builder.range(mode_range(mode), start, start + 9_000_000)
            for kernel in range(2 * TABLE_ROWS):
                launch, correlation = start + 1000 * kernel, 1000 * number + kernel
                builder.call("cudaLaunchKernel", launch, launch + 5, correlation)
                name = f"void {'n' * 450}_{mode}_{kernel}"
                builder.kernel(name, launch + 10, launch + 400, correlation)
    data = of_export(tmp_path / "export.sqlite")
    assert data["modes"]["train_step"]["rest"]["names"] == TABLE_ROWS
    assert len(json.dumps(data)) < 0.9 * SIZE_LIMIT_BYTES
