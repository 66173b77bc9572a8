"""The machine card and vendor peaks: every field present, nothing guessed."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch

from lmlab.measure.card import gpu_limits, machine_card, nvml_facts
from lmlab.measure.peaks import known_devices, peaks_of

from .fake_nvml import FakeGpu, FakeNvml

GPU_ONLY = {
    *("sms", "warp_size", "registers_per_sm", "registers_per_block", "l2_bytes", "memory_bytes"),
    *("shared_memory_per_sm_bytes", "shared_memory_per_block_bytes"),
    *("shared_memory_per_block_optin_bytes", "compute_capability"),
    *("driver", "clocks_mhz", "power_limit_w"),
}


def test_a_cpus_card_describes_the_processor_and_has_null_gpu_fields() -> None:
    card = json.loads(json.dumps(machine_card(torch.device("cpu"))))
    assert (card["device"], card["name"]) == ("cpu", card["cpu"]["model"])
    assert 1 <= card["cpu"]["usable_cores"] <= card["cpu"]["logical_cores"]
    assert card["cpu"]["memory_bytes"] > 2**28
    assert {field: card[field] for field in GPU_ONLY} == dict.fromkeys(GPU_ONLY)


def test_what_torch_or_nvml_does_not_report_is_null() -> None:
    properties = SimpleNamespace(major=9, minor=0, multi_processor_count=132, warp_size=32)
    limits = gpu_limits(properties)
    assert (limits["sms"], limits["warp_size"], limits["compute_capability"]) == (132, 32, "9.0")
    assert limits["registers_per_sm"] is None
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
    card = json.loads(json.dumps(machine_card(torch.device("cuda", 0))))
    assert {field for field in GPU_ONLY if card[field] is None} == set()
    assert (card["gpu_count"] >= 1, card["name"]) == (True, torch.cuda.get_device_name(0))


def test_an_h200_has_the_figures_of_its_datasheet() -> None:
    peaks = peaks_of("NVIDIA H200")
    assert peaks is not None
    assert peaks["tflops"] == {"fp32": 67.0, "tf32": 494.7, "fp16": 989.4, "bf16": 989.4}
    assert peaks["memory_tb_per_s"] == 4.8


@pytest.mark.parametrize(
    "name",
    [
        *("", "NVIDIA H2000", "NVIDIA H100", "NVIDIA GeForce RTX 4090 Laptop GPU"),
        *("NVIDIA A100-SXM4-80GB MIG 1g.10gb", "AMD EPYC 7763 64-Core Processor"),
    ],
)
def test_an_unknown_device_has_no_peak(name: str) -> None:
    assert peaks_of(name) is None


@pytest.mark.parametrize("name", known_devices())
def test_every_known_device_is_unique_complete_and_sourced(name: str) -> None:
    peaks = peaks_of(name)
    assert peaks is not None
    assert known_devices().count(name) == 1
    assert set(peaks["tflops"]) == {"fp32", "tf32", "fp16", "bf16"}
    assert peaks["tflops"]["fp32"] <= peaks["tflops"]["tf32"]
    # Dense tensor rates: bf16 is twice tf32 on every chip here, to the digits that vendors print.
    assert peaks["tflops"]["bf16"] == pytest.approx(2 * peaks["tflops"]["tf32"], rel=0.02)
    assert 0.1 < peaks["memory_tb_per_s"] < 10
    assert "datasheet" in peaks["source"] or "whitepaper" in peaks["source"]
