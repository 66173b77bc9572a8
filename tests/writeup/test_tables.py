"""Tables: numbers where there are some, reasons where there are none."""

from __future__ import annotations

import inspect
from dataclasses import replace

import pytest
import torch

from lmlab.study.points import Point
from lmlab.study.results import Result
from lmlab.writeup.table import Table
from lmlab.writeup.tables import end_to_end, machine, precision
from tests.writeup import factory, synthetic


def column(table: Table, title: str) -> dict[tuple[str, ...], str]:
    """A column's cells by size and context."""
    index = [c.title for c in table.columns].index(title)
    return {tuple(row[:2]): row[index] for row in table.rows}


@pytest.fixture(scope="module")
def gpu() -> dict[str, Table]:
    return end_to_end.tables(synthetic.collected("end_to_end"))


@pytest.fixture(scope="module")
def cpu() -> dict[str, Table]:
    return end_to_end.tables(synthetic.collected("end_to_end", "cpu"))


def broken(point: Point, device: str) -> Result | None:
    """One point of every way to have no number."""
    p = point.parameters
    if p["size"] == "2.7b" and p["precision"] == "fp32" and p["mode"] == "train_step":
        if p["context"] == 1024:
            return factory.failed(point, "oom", "tried to allocate 20 GiB", device)
        if p["context"] == 512:
            return None
        if p["context"] == 256:
            return factory.failed(point, "failed", "loss is not finite", device)
    return synthetic.end_to_end(point, device)


def test_every_row_of_the_study_is_in_every_grid_table(gpu: dict[str, Table]) -> None:
    assert list(gpu) == [
        "times_fp32", "times_bf16", "rates_fp32", "rates_bf16", "busy", "repeats", "speedup_bf16",
        "warmup", "published",
    ]  # fmt: skip
    for name, table in gpu.items():
        if name not in {"published", "repeats"}:
            assert len(table.rows) == 20, name
            assert all(len(row) == len(table.columns) for row in table.rows)


def test_times_are_mean_deviation_and_median(gpu: dict[str, Table]) -> None:
    point = next(
        row.result
        for row in synthetic.collected("end_to_end").rows
        if row.point.parameters["mode"] == "train_step"
    )
    assert point is not None
    forward = point.measurements["forward"]
    cell = column(gpu["times_fp32"], "Forward (ms)")["small", "128"]
    assert cell == f"{forward['mean_ms']:.3f} ± {forward['sd_ms']:.3f} ({forward['median_ms']:.3f})"


def test_a_point_without_a_number_says_why_in_its_cell() -> None:
    tables = end_to_end.tables(synthetic.collected("end_to_end", make=broken))
    forward = column(tables["times_fp32"], "Forward (ms)")
    assert forward["2.7b", "1024"] == "OOM"
    assert forward["2.7b", "512"] == "not measured"
    assert forward["2.7b", "256"] == "failed"
    assert "±" in column(tables["times_fp32"], "Forward, no gradient (ms)")["2.7b", "1024"]
    for title in ("Backward : forward", "Tokens/s", "TFLOP/s", "MFU", "Of measured matmul"):
        assert column(tables["rates_fp32"], title)["2.7b", "1024"] == "OOM"
    assert column(tables["busy"], "Forward, fp32")["2.7b", "1024"] == "OOM"
    assert column(tables["speedup_bf16"], "Backward")["2.7b", "1024"] == "fp32: OOM"
    assert "(39 of 40 files)" in tables["times_fp32"].sources[0]


def test_a_known_gpu_has_mfu_whose_source_is_told_once(gpu: dict[str, Table]) -> None:
    assert column(gpu["rates_fp32"], "MFU")["2.7b", "1024"].endswith(" %")
    caption = gpu["rates_fp32"].caption
    assert "MFU: of the stated 67 TFLOP/s, sourced in the chapter on the machine." in caption
    ceilings = machine.tables(synthetic.collected("machine"))["ceilings"]
    assert "NVIDIA H200 Tensor Core GPU datasheet" in ceilings.caption
    assert 'convention "full"' in gpu["rates_fp32"].caption


def test_an_unknown_device_has_no_mfu_and_says_why(cpu: dict[str, Table]) -> None:
    assert set(column(cpu["rates_fp32"], "MFU").values()) == {"no MFU"}
    assert "no sourced fp32 peak for Test Processor" in cpu["rates_fp32"].caption
    assert column(cpu["rates_fp32"], "Of measured matmul")["cpu-large", "128"].endswith(" %")


def test_a_model_without_a_cost_model_has_no_rates() -> None:
    def make(point: Point, device: str) -> Result:
        result = synthetic.end_to_end(point, device)
        return replace(result, data={**result.data, "flops": None})

    table = end_to_end.tables(synthetic.collected("end_to_end", make=make))["rates_fp32"]
    assert column(table, "MFU")["small", "128"] == "FLOPs not known"
    assert column(table, "Tokens/s")["small", "128"] != "FLOPs not known"
    assert "the cost model does not describe this model" in table.caption


def test_a_gpu_has_busy_shares_and_a_cpu_has_none(
    gpu: dict[str, Table], cpu: dict[str, Table]
) -> None:
    assert column(gpu["busy"], "Forward, fp32")["2.7b", "1024"] == "100 %"
    assert "busy" not in cpu


def test_differences_within_noise_are_marked(gpu: dict[str, Table]) -> None:
    assert column(gpu["speedup_bf16"], "Optimizer")["small", "128"] == "1.00× ≈"
    assert column(gpu["speedup_bf16"], "Backward")["2.7b", "1024"].endswith("×")
    assert "A ratio across points" in gpu["speedup_bf16"].caption


def test_what_was_measured_twice_stands_by_who_is_the_limit(
    gpu: dict[str, Table], cpu: dict[str, Table]
) -> None:
    busy = [row[0] for row in gpu["repeats"].rows]
    assert busy == ["at least 95 %", "80 to 95 %", "under 80 %"]
    *_, largest, where, beyond = gpu["repeats"].rows[2]
    assert (largest, beyond) == ("8.0 %", "8.0 %")
    assert where.startswith(("forward of ", "backward of "))
    (only,) = cpu["repeats"].rows
    assert (only[0], only[-1]) == ("CPU", "2.0 %")
    assert "in a cold start and in a warm start" in gpu["repeats"].caption


def test_a_study_that_measures_nothing_twice_has_no_table_of_it() -> None:
    study = factory.study("cuda", modes=["forward"], sizes=["small"], contexts=[128])
    collected = factory.collected("end_to_end", synthetic.end_to_end, what=study)
    assert "repeats" not in end_to_end.tables(collected)


def test_the_warm_up_table_has_a_row_a_size_and_count(gpu: dict[str, Table]) -> None:
    assert [row[:2] for row in gpu["warmup"].rows[:4]] == [
        ["small", "0"], ["small", "1"], ["small", "2"], ["small", "5"],
    ]  # fmt: skip
    assert {row[-1] for row in gpu["warmup"].rows} == {"3"}
    assert "Context 256, fp32, train_step." in gpu["warmup"].caption


def test_published_figures_stand_beside_ours(gpu: dict[str, Table]) -> None:
    rows = {tuple(row[:4]): row[4:] for row in gpu["published"].rows}
    assert rows["H800 PCIe", "001", "128", "4"][0] == "21.57 / 23.02"
    assert rows["GPU not stated", "004", "256", "not stated"][0] == "20.50 / not stated"
    assert rows["A10", "000", "not stated", "4"][-1] == "not stated"
    assert ("NVIDIA H200", "this page", "128", "4") in rows
    assert "report/references/end_to_end.csv" in gpu["published"].sources
    assert "32 layers instead of 36" in gpu["published"].caption


def test_a_cpu_has_no_published_counterpart(cpu: dict[str, Table]) -> None:
    assert "published" not in cpu


def test_several_batches_have_a_column_of_their_own() -> None:
    study = factory.study("cuda", sizes=["small"], contexts=[128], batches=[4, 8])
    collected = factory.collected("end_to_end", synthetic.end_to_end, what=study)
    table = end_to_end.tables(collected)["times_fp32"]
    assert [row[:3] for row in table.rows] == [["small", "128", "4"], ["small", "128", "8"]]
    assert "batch" not in table.caption


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_machine_tables(device: str) -> None:
    tables = machine.tables(synthetic.collected("machine", device))
    facts = {row[0]: row[1] for row in tables["card"].rows}
    assert ("Compute capability" in facts) is (device == "cuda")
    ceilings = {row[0]: row[1:] for row in tables["ceilings"].rows}
    assert ceilings["matmul fp32"][-1] == ("71.6 %" if device == "cuda" else "–")


def test_a_ceiling_without_a_number_has_its_reason() -> None:
    (point,) = [row.point for row in synthetic.collected("machine").rows]
    data = dict(synthetic.card(point).data)
    none = {"tflops": None, "shape": None, "median_ms": None, "reason": "no bf16 here"}
    data["ceilings"] = {**data["ceilings"], "matmul_tflops": {"bf16": none}}
    card = factory.result(point, data=data)
    tables = machine.tables(factory.collected("machine", lambda p, d: card, card=card))
    assert tables["ceilings"].rows[0][:2] == ["matmul bf16", "no bf16 here"]


def test_precision_tables() -> None:
    tables = precision.tables(synthetic.collected("precision"))
    assert [row[3] for row in tables["accumulation"].rows][:2] == ["10.0001335", "9.9531250"]
    assert tables["autocast"].rows[1] == ["output of fc1", "float16", "bfloat16"]
    assert tables["layernorm"].rows[0][2] == "underflow"
    assert tables["layernorm"].rows[-1][2] == "overflow"
    assert "well above eps = 1 × 10⁻⁵, which LayerNorm" in tables["layernorm_output"].caption


def test_eps_is_that_of_pytorchs_layernorm() -> None:
    default = inspect.signature(torch.nn.functional.layer_norm).parameters["eps"].default
    assert default == precision.LAYERNORM_EPS


def test_a_sum_of_squares_beyond_fp16_does_not_overflow_in_pytorchs_mean() -> None:
    squares = torch.full((768,), 256.0, dtype=torch.float16)
    assert squares.sum(dtype=torch.float64) > torch.finfo(torch.float16).max
    assert squares.mean() == 256.0


def test_a_type_that_autocast_refuses_is_a_value() -> None:
    def make(point: Point, device: str) -> Result:
        if point.parameters.get("dtype") == "fp16":
            return factory.failed(point, "unsupported", "no fp16 on this CPU", device)
        return synthetic.precision(point, device)

    table = precision.tables(synthetic.collected("precision", make=make))["autocast"]
    assert {row[1] for row in table.rows} == {"unsupported"}
    assert table.rows[1][2] == "bfloat16"


@pytest.mark.parametrize("chapter", ["end_to_end", "machine", "precision"])
def test_without_any_result_tables_say_so(chapter: str) -> None:
    module = {"end_to_end": end_to_end, "machine": machine, "precision": precision}[chapter]
    tables = module.tables(factory.collected(chapter, lambda point, device: None))
    cells = [cell for table in tables.values() for row in table.rows for cell in row]
    assert "not measured" in cells
    assert not any("nan" in cell for cell in cells)
