"""The machine card as a result."""

from __future__ import annotations

import json

import torch

from lmlab.chapters.machine import measure as machine
from lmlab.study.points import Point


def test_the_card_has_the_machine_its_ceilings_and_its_peaks(cpu: torch.device) -> None:
    data = machine.measure(Point("machine", {}, {"quick": True, "seed": 0}), cpu).data
    assert data["card"]["device"] == "cpu"
    assert data["ceilings"]["matmul_tflops"]["fp32"]["tflops"] > 0
    assert data["peaks"] is None  # no datasheet is claimed for a processor
    assert json.loads(json.dumps(data, allow_nan=False)) == data
