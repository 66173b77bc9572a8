"""Six principles: programs are checked before they are timed, and what the page makes of pairs."""

from pathlib import Path
from typing import Any

import pytest
import torch

from lmlab.chapters.principles.measure import divergence, measure
from lmlab.chapters.principles.measure.programs import Program, compare
from lmlab.chapters.principles.page import PARTS
from lmlab.jobs.outcome import Outcome, Unsupported
from lmlab.measure.records import value
from lmlab.study.points import Point
from tests.chapters.pages import answer, found, rendered, value_of
from tests.report.study import result, time_record, written

BUDGET = {"samples": 3, "variant_cap_s": 0.01, "seed": 0}
SETTINGS: dict[str, dict[str, Any]] = {
    "divergence": {"threads": 2**14, "branches": [1, 4, 32]},
    "precision": {"sides": [32, 64], "precisions": ["fp32", "tf32", "bf16", "fp8"]},
    "fusion": {"rows": 64, "columns": [64, 128], "compile": False},
    "recomputation": {"rows": 32, "width": 16, "depths": [1, 4]},
    "coalescing": {"numbers": 1000, "strides": [1, 8], "side": 128},
    "tiling": {"side": 256, "tiles": [[16, 16], [64, 64]]},
}


def measured(topic: str, device: str = "cpu") -> Outcome:
    point = Point("principles", {"topic": topic}, {**SETTINGS[topic], **BUDGET})
    return measure(point, torch.device(device))


@pytest.mark.gpu
@pytest.mark.parametrize("topic", SETTINGS)
def test_every_topic_on_a_gpu(topic: str) -> None:
    outcome = measured(topic, "cuda")
    assert {r["status"] for r in outcome.measurements} == {"ok"}
    pairs = {r["labels"]["pair"] for r in found(outcome, "time") if "pair" in r["labels"]}
    assert pairs == {"with", "without"}


@pytest.mark.parametrize("topic", ["divergence", "tiling"])
def test_what_needs_a_gpu_is_unsupported(topic: str) -> None:
    with pytest.raises(Unsupported):
        measured(topic)


def test_fewer_bits_give_larger_errors() -> None:
    outcome = measured("precision")
    errors = {r["labels"]["series"]: r["value"] for r in found(outcome, "error", x=64)}
    assert errors["fp32"] < 1e-5
    if "bf16" in errors:  # refused where a CPU multiplies it element by element
        assert 1e-4 < errors["bf16"] < 1e-2
    (fp8,) = found(outcome, "time", series="fp8", x=64)
    assert fp8["status"] == "unsupported"


def test_recomputation_keeps_the_inputs_of_blocks_alone() -> None:
    outcome = measured("recomputation")
    numbers = 32 * 16
    kept = {
        (r["labels"]["series"], r["labels"]["x"]): r["value"] // 4
        for r in found(outcome, "saved_bytes")
    }
    # Every block's input, and the last output for the mean of squares.
    assert kept["with", 4] == 5 * numbers
    # And each block's hidden numbers, before and after GELU.
    assert kept["without", 4] == (5 + 4 * 8) * numbers


def test_copies_sums_and_chains_count_useful_bytes() -> None:
    outcome = measured("coalescing")
    assert {r["value"] for r in found(outcome, "bytes", series="copy")} == {8000}
    assert value_of(outcome, "bytes", variant="row sums") == 4 * 128**2
    assert {r["value"] for r in found(outcome, "error", series="copy")} == {0.0}
    # The fused chain is left out where it would be interpreted.
    outcome = measured("fusion")
    status = {r["labels"]["variant"]: r["status"] for r in found(outcome, "time")}
    assert status["GELU chain, 128, eager"] == "ok"
    assert status["GELU chain, 128, ours"] == "unsupported"


def test_branches_do_the_same_work_on_either_side() -> None:
    """One branch is the same program; more differ in which threads take which."""
    x = torch.linspace(-1, 1, 128)
    one = divergence.expected(x, 1, True)
    assert torch.equal(divergence.expected(x, 1, False), one)
    within = divergence.expected(x, 4, False)
    between = divergence.expected(x, 4, True)
    assert torch.equal(within[::4], one[::4])
    assert torch.equal(between[:32], one[:32])
    assert divergence.source().count("case ") == 32


def test_a_wrong_program_gets_no_time(cpu: torch.device) -> None:
    programs = {
        name: Program(call=lambda: None, error=lambda found, e=error: e, within=0.1)
        for name, error in {"right": 0.01, "wrong": 0.5, "broken": float("nan")}.items()
    }
    outcome = compare(programs, BUDGET, cpu).outcome()
    status = {r["labels"]["variant"]: r["status"] for r in found(outcome, "time")}
    assert status == {"right": "ok", "wrong": "failed", "broken": "failed"}


def pair(topic: str, without: float, with_: float) -> Any:
    records = []
    for kind, ms in (("without", without), ("with", with_)):
        labels = {"variant": f"program {kind}", "series": kind, "x": 32, "pair": kind}
        records.append(time_record([ms, ms * 1.001, ms * 0.999], "events", **labels))
        records.append(value("bytes", 10**9, "B", **labels))
        records.append(value("saved_bytes", 8 if kind == "without" else 2, "B", **labels))
    return result({"topic": topic}, records, chapter="principles")


def test_the_page_quotes_factors_and_shares_of_the_ceiling(tmp_path: Path) -> None:
    machine = [
        value("matmul_rate", 500.0, "TFLOP/s", dtype="bf16"),
        value("copy_bandwidth", 4000.0, "GB/s"),
        value("device", "cuda", "", fact="device"),
        *(value(name, 132, "", fact=name) for name in (*PARTS, "power_limit_w")),
    ]
    results = [
        result({}, machine, chapter="machine"),
        pair("coalescing", 4.0, 0.5),
        pair("recomputation", 2.0, 3.0),
        result({"topic": "tiling"}, chapter="principles", status="unsupported", reason="no GPU"),
    ]
    front, pages = rendered(tmp_path, written(tmp_path / "r", results), "machine", "principles")
    best = answer(front, "What makes a GPU fast?")
    assert "up to 8.0x" in best
    assert "4.0x less is kept" in best
    # 1 GB in 0.5 ms is 2,000 GB/s, half of the copy.
    assert "| Coalescing | program without | program with | 8.0x | 50 % |" in front
    assert "132 streaming multiprocessors" in pages["principles"]
    assert "Tiling: no GPU" in pages["principles"]
