"""Every layer between nvidia-smi and the bytes of tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lmlab.measure.memory import accounting
from tests.measure.fake_nvml import FakeGpu, FakeNvml

GIB = 2**30


def test_the_layers_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    stats: dict[str, Any] = {
        "reserved_bytes.all.current": 4 * GIB,
        "allocated_bytes.all.peak": 5 * GIB,
        "num_alloc_retries": 2,
    }
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10 * GIB, 16 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: stats)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 4 * GIB)
    monkeypatch.setattr(accounting, "nvidia_smi_used_bytes", lambda index: 7 * GIB)
    layers = accounting.account(torch.device("cuda", 0))
    expected = {"device_used": 6, "outside_pytorch": 2, "nvidia_smi_used": 7, "reserved": 4}
    assert {name: layers[f"{name}_bytes"] / GIB for name in expected} == expected
    assert (layers["peak_allocated_bytes"], layers["alloc_retries"]) == (5 * GIB, 2)
    assert layers["requested_bytes"] is None, "a counter that this torch does not have"


def test_the_driver_reports_the_whole_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    nvml = FakeNvml(FakeGpu(memory_used=5 * GIB))
    assert accounting.nvidia_smi_used_bytes(0, nvml) == 5 * GIB
    assert accounting.nvidia_smi_used_bytes(1, nvml) is None
    assert accounting.nvidia_smi_used_bytes(0, FakeNvml(library=False)) is None
    assert accounting.nvidia_smi_used_bytes(0, FakeNvml(FakeGpu(unanswered={"memory"}))) is None


def test_a_cpu_has_resident_memory() -> None:
    assert accounting.account(torch.device("cpu"))["resident_bytes"] > 10 * 2**20
