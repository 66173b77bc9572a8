"""Profile: three modes in one capture, a wall time taken before, and what a trace becomes."""

import json
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from lmlab.chapters.profile import measure as profile
from lmlab.chapters.profile.measure import measure, trace_folder
from lmlab.chapters.profile.trace_data import (
    PHASES_OF_MODE,
    TABLE_ROWS,
    TOTAL,
    complete,
    mode_range,
    of_trace,
)
from lmlab.jobs.outcome import Outcome, Unsupported
from lmlab.jobs.workload import Step
from lmlab.measure.records import Record, value
from lmlab.measure.trace import chrome_trace, nsys
from lmlab.measure.trace.frames import TraceError
from lmlab.measure.trace.nsys_command import NSYS_UNAVAILABLE, UNDER_NSYS
from lmlab.study.results import SIZE_LIMIT_BYTES, ResultError, read
from tests.chapters.pages import by, found, value_of
from tests.chapters.test_end_to_end import WATCHING
from tests.jobs.points import profile_point
from tests.measure.trace.export_builder import ExportBuilder
from tests.measure.trace.three_modes import (
    BACKWARD_US,
    FORWARD_US,
    OPTIMIZER_US,
    SGEMM_BACKWARD,
    US,
    write_export,
)
from tests.report.study import result

CPU = torch.device("cpu")
MODES = ("forward", "forward_backward", "train_step")
MEASURED = result({"size": "small"}, [value("tokens", 16, "")], chapter="profile")
MATMULS = 2 * 9 + 1  # per layer 7 projections and 2 in attention, and the head


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(UNDER_NSYS, raising=False)
    monkeypatch.delenv(NSYS_UNAVAILABLE, raising=False)


@pytest.fixture(scope="module")
def outcome() -> Outcome:
    return measure(profile_point(), CPU)


def test_each_mode_runs_its_phases_and_they_add_up(outcome: Outcome) -> None:
    matmuls = by(outcome, "mode", "family_instances", family="matmul")
    assert matmuls == dict(zip(MODES, (MATMULS, 3 * MATMULS, 3 * MATMULS), strict=True))
    assert list(by(outcome, "mode", "family_instances", family="optimizer")) == ["train_step"]
    for quantity, mode in product(("kernels", "total_time", "host_time"), MODES):
        phases = by(outcome, "phase", quantity, mode=mode)
        assert phases.pop("total") == pytest.approx(sum(phases.values()))


def test_the_forward_pass_is_timed_before_it_is_profiled(monkeypatch: pytest.MonkeyPatch) -> None:
    called = Mock()
    for name in ("time_steps", "profile"):
        called.attach_mock(Mock(wraps=getattr(profile, name)), name)
        monkeypatch.setattr(profile, name, getattr(called, name))
    monkeypatch.setenv(NSYS_UNAVAILABLE, "nsys is not on the PATH")
    outcome = measure(profile_point(steps=4), CPU)
    (wall,) = found(outcome, "time")
    assert [name for name, *_ in called.mock_calls] == ["time_steps", "profile"]
    assert (wall["labels"], wall["clock"], wall["n"]) == ({"phase": "forward"}, "wall", 4)
    assert value_of(outcome, "profiler_note") == "nsys is not on the PATH"


def test_attentions_parts_and_all_matmuls_have_costs(outcome: Outcome) -> None:
    times = by(outcome, "part", "part_total_time")
    assert set(times) == {"scores", "scale_and_mask", "softmax", "output"}
    assert all(time > 0 for time in times.values())
    assert value_of(outcome, "part_kernels", part="softmax") == 2
    assert value_of(outcome, "flops", part="softmax") == 5 * 2 * (2 * 2 * 8 * 8)
    assert set(by(outcome, "part", "traffic")) == set(times)
    assert value_of(outcome, "profiler_version") == f"torch profiler {torch.__version__}"
    flops = by(outcome, "mode", "matmul_flops")
    assert flops["train_step"] == flops["forward_backward"] == 3 * flops["forward"]


@pytest.mark.parametrize(
    ("changes", "has_parts"),
    [
        ({"attention": "sdpa_math"}, False),
        ({"model": WATCHING}, False),
        ({"precision": "bf16"}, True),  # autocast mixes types, so costs are not known
    ],
)
def test_costs_are_given_where_they_are_known(changes: dict[str, Any], has_parts: bool) -> None:
    outcome = measure(profile_point(**changes), CPU)
    assert bool(found(outcome, "part_total_time")) == has_parts
    assert not found(outcome, "flops")


def test_a_mode_that_does_not_fit_costs_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Step, "backward", Mock(side_effect=torch.OutOfMemoryError("no")))
    outcome = measure(profile_point(), CPU)
    spans = found(outcome, "span_time", phase="total")
    status = {record["labels"]["mode"]: record["status"] for record in spans}
    assert status == {"forward": "ok", "forward_backward": "oom", "train_step": "oom"}
    assert list(outcome.data["modes"]) == ["forward"]
    assert outcome.data["timeline"]["device_phases"]


@pytest.mark.slow
def test_a_trace_is_kept_only_if_asked_for() -> None:
    point = profile_point(size="2.7b", keep_traces=True)
    measure(profile_point(), CPU)
    assert not Path("traces").exists()
    measure(point, CPU)
    folder = trace_folder(point)
    assert "size~2.7b" in folder.parts
    kernels = chrome_trace.read(folder / "trace.json.gz", on_cpu=True).kernels
    assert "aten::bmm" in set(kernels["name"])


def test_under_nsys_the_trace_is_left_to_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    huge = profile_point(skip_if_too_large=True, d_model=2**20, num_layers=10**4)
    with pytest.raises(Unsupported, match=r"needs about .* GiB"):
        measure(huge, CPU)
    point = profile_point(profiler="nsys")
    with pytest.raises(Unsupported, match="nsys is not recording this process"):
        measure(point, CPU)
    monkeypatch.setenv(UNDER_NSYS, "1")
    outcome = measure(point, CPU)
    assert outcome.data == {}
    assert not found(outcome, "profiler_version")
    assert list(by(outcome, "phase", "time")) == ["forward"]


@pytest.mark.gpu
def test_on_a_gpu_every_phase_has_kernels_and_launches_come_before_them() -> None:
    outcome = measure(profile_point(), torch.device("cuda", 0))
    kernels = by(outcome, "phase", "kernels", mode="train_step")
    assert all(kernels[phase] for phase in ("forward", "backward", "optimizer"))
    assert value_of(outcome, "delay_median_time", mode="train_step") > 0
    assert all(by(outcome, "part", "part_kernels").values())


@pytest.fixture
def export(tmp_path: Path) -> Path:
    write_export(tmp_path / "export.sqlite")
    return tmp_path / "export.sqlite"


def of(records: list[Record], quantity: str, **labels: Any) -> list[Any]:
    """Values of a quantity, times in microseconds, where these labels agree."""
    return [
        round(record["value"] * 1000, 6) if record["unit"] == "ms" else record["value"]
        for record in found(Outcome(measurements=records), quantity, **labels)
    ]


def test_every_mode_has_its_own_work_and_kernels_by_rank(export: Path) -> None:
    records, data = of_trace(nsys.read(export))
    step_us = FORWARD_US + BACKWARD_US + OPTIMIZER_US
    by_mode = [of(records, "total_time", mode=mode, phase=TOTAL) for mode in PHASES_OF_MODE]
    assert by_mode == [[FORWARD_US], [FORWARD_US + BACKWARD_US], [step_us]]
    assert of(records, "total_time", mode="train_step", phase="optimizer") == [OPTIMIZER_US]
    assert of(records, "kernel_total_time", mode="forward", rank=1) == [4 * 400]
    assert of(records, "kernel_instances", mode="forward", rank=1) == [4]
    assert of(records, "launches", mode="forward") == [14]
    assert of(records, "launch_time", mode="forward") == [5]
    families = {"mode": "train_step", "family": "optimizer"}
    assert of(records, "family_total_time", **families) == [OPTIMIZER_US]
    assert of(records, "family_instances", **families) == [3]
    assert sum(of(records, "family_total_time", mode="train_step")) == step_us
    table = data["modes"]["train_step"]["table"]
    assert data["names"][table["name"][0]]["name"] == SGEMM_BACKWARD
    assert sum(table["total_ns"]) == step_us * US


def test_attention_is_cut_at_its_matmuls_and_its_softmax(export: Path) -> None:
    records, data = of_trace(nsys.read(export))
    parts = ("scores", "scale_and_mask", "softmax", "output")
    for name, expected in (("total", [200, 100, 100, 200]), ("product", [200, 0, 0, 200])):
        times = [of(records, f"part_{name}_time", part=part) for part in parts]
        assert times == [[us] for us in expected]
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
    records, data = of_trace(nsys.read(tmp_path / "export.sqlite"))
    kernels = [record["labels"] for record in records if record["quantity"] == "kernel_instances"]
    ranks = [labels["rank"] for labels in kernels if labels["mode"] == "forward"]
    assert ranks == [*range(1, 11), *range(41, 46)]
    assert of(records, "part_total_time") == []
    assert len(data["modes"]["train_step"]["table"]["name"]) == TABLE_ROWS
    assert len(json.dumps([records, data], allow_nan=False)) < 0.9 * SIZE_LIMIT_BYTES
    with ExportBuilder(tmp_path / "empty.sqlite") as builder:
        builder.range(mode_range("forward"), 0, 100)
    with pytest.raises(TraceError, match=r"nsys 2025.3.1.90 recorded no kernels in 'mode forward'"):
        of_trace(nsys.read(tmp_path / "empty.sqlite"))


def test_the_report_completes_what_the_process_measured(tmp_path: Path, export: Path) -> None:
    MEASURED.write(tmp_path / "measured.json")
    complete(tmp_path / "measured.json", export, tmp_path / "out.json")
    completed, (records, data) = read(tmp_path / "out.json"), of_trace(nsys.read(export))
    assert completed.measurements == (*MEASURED.measurements, *records)
    assert completed.data == data
    assert of(records, "profiler_version") == ["nsys 2025.3.1.90"]
    assert completed.code_fingerprint == MEASURED.code_fingerprint
    failed = replace(MEASURED, status="oom", reason="needs 9 GiB more", measurements=())
    failed.write(tmp_path / "measured.json")
    complete(tmp_path / "measured.json", tmp_path / "no export", tmp_path / "out.json")
    assert read(tmp_path / "out.json") == failed, "a point without numbers has no export"


@pytest.mark.parametrize("missing", ["measured", "export"])
def test_a_missing_half_gives_no_result(tmp_path: Path, export: Path, missing: str) -> None:
    paths = {"measured": tmp_path / "measured.json", "export": export}
    MEASURED.write(paths["measured"])
    paths[missing].unlink()
    with pytest.raises((TraceError, ResultError), match=r"does not exist|not a readable"):
        complete(**paths, out=tmp_path / "out.json")
    assert not (tmp_path / "out.json").exists()
