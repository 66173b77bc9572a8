"""The machine card: measured ceilings, stated peaks, and facts."""

from pathlib import Path
from typing import Any

import pytest
import torch

from lmlab.chapters.machine import measure as machine
from lmlab.study.points import Point
from tests.chapters.pages import answer, found, rendered, value_of
from tests.report.study import result, written

CEILINGS: dict[str, Any] = {
    "matmul_tflops": {
        "fp32": {"tflops": 50.0, "shape": [4096] * 3, "reason": None},
        "bf16": {"tflops": None, "shape": None, "reason": "no bf16 here"},
    },
    "copy_gb_per_s": {"gb_per_s": 4000.0, "bytes": 2**32, "reason": None},
}
PEAKS = {"tflops": {"fp32": 67.0}, "memory_tb_per_s": 4.8, "source": "a datasheet"}
CARD = {"name": "GPU", "sms": 132, "power_limit_w": 700.0, "l2_bytes": None, "cpu": {"model": "X"}}


def test_a_cpu_has_ceilings_and_no_stated_peak(cpu: torch.device) -> None:
    outcome = machine.measure(Point("machine", {}, {"quick": True, "seed": 0}), cpu)
    assert value_of(outcome, "matmul_rate", dtype="fp32") > 0
    assert value_of(outcome, "copy_bandwidth") > 0
    assert found(outcome, "stated_matmul_rate") == []
    assert value_of(outcome, "device") == "cpu"


def test_what_is_unknown_has_no_record_and_what_failed_has_a_reason() -> None:
    records = {record["quantity"]: record for record in machine.records_of(CARD, CEILINGS, PEAKS)}
    assert records["matmul_rate"]["reason"] == "no bf16 here"
    assert records["stated_bandwidth"]["value"] == 4800.0
    assert records["cpu_model"]["value"] == "X"
    assert "l2_bytes" not in records


@pytest.mark.parametrize("peaks", [PEAKS, None], ids=["datasheet", "no datasheet"])
@pytest.mark.parametrize("flags", [(), ("power_capped",)], ids=["free", "capped"])
def test_every_answer_renders(tmp_path: Path, peaks: Any, flags: tuple[str, ...]) -> None:
    records = machine.records_of(CARD, CEILINGS, peaks)
    card = result({}, records, chapter="machine", settings={"seed": 0}, flags=flags)
    front, pages = rendered(tmp_path, written(tmp_path / "r", [card]), "machine")
    assert "50.0 TFLOP/s" in answer(front, "What can this machine do?")
    assert ("67.0" in pages["machine"]) is (peaks is not None)
