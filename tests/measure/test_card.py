"""The machine card: every field present, null for what a machine does not report."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch

from lmlab.measure.card import gpu_limits, machine_card, nvml_facts

from .fake_nvml import FakeGpu, FakeNvml

GPU_ONLY = {
    *("sms", "warp_size", "registers_per_sm", "registers_per_block", "l2_bytes", "memory_bytes"),
    *("shared_memory_per_sm_bytes", "shared_memory_per_block_bytes"),
    *("shared_memory_per_block_optin_bytes", "compute_capability"),
    *("driver", "clocks_mhz", "power_limit_w"),
}


def test_a_cpus_card_describes_the_processor_and_has_null_gpu_fields() -> None:
    card = json.loads(json.dumps(machine_card(torch.device("cpu"))))
    assert card["device"] == "cpu"
    assert card["name"] == card["cpu"]["model"]
    assert 1 <= card["cpu"]["usable_cores"] <= card["cpu"]["logical_cores"]
    assert card["cpu"]["memory_bytes"] > 2**28
    assert {field: card[field] for field in GPU_ONLY} == dict.fromkeys(GPU_ONLY)


def test_limits_that_torch_does_not_report_are_null() -> None:
    properties = SimpleNamespace(major=9, minor=0, multi_processor_count=132, warp_size=32)
    limits = gpu_limits(properties)
    assert (limits["sms"], limits["warp_size"], limits["compute_capability"]) == (132, 32, "9.0")
    assert limits["registers_per_sm"] is None


def test_nvml_gives_driver_clocks_and_power_limit() -> None:
    assert nvml_facts(FakeNvml(), FakeGpu(sm_clock=345)) == {
        "driver": "580.1",
        "clocks_mhz": {"sm": 345, "memory": 3201, "sm_max": 1980, "memory_max": 3201},
        "power_limit_w": 700.0,
    }
    facts = nvml_facts(FakeNvml(), FakeGpu(unanswered={"clock", "power_limit"}))
    assert (facts["clocks_mhz"]["sm"], facts["power_limit_w"]) == (None, None)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_a_gpus_card_is_complete() -> None:
    card = machine_card(torch.device("cuda", 0))
    assert {field for field in GPU_ONLY if card[field] is None} == set()
    assert card["gpu_count"] >= 1
    assert card["name"] == torch.cuda.get_device_name(0)
    json.dumps(card)
