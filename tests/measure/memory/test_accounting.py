"""Every layer between nvidia-smi and a tensor's bytes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lmlab.measure.memory import accounting
from tests.measure.fake_nvml import FakeGpu, FakeNvml

GIB = 2**30
CUDA = torch.device("cuda", 0)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    stats: dict[str, Any] = {
        "reserved_bytes.all.current": 4 * GIB,
        "allocated_bytes.all.current": 3 * GIB,
        "allocated_bytes.all.peak": 5 * GIB,
        "inactive_split_bytes.all.current": GIB // 2,
        "num_alloc_retries": 2,
    }
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10 * GIB, 16 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: stats)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 4 * GIB)
    monkeypatch.setattr(accounting, "nvidia_smi_used_bytes", lambda index: 7 * GIB)


@pytest.mark.usefixtures("gpu")
def test_what_lies_outside_pytorch_is_used_minus_reserved() -> None:
    layers = accounting.account(CUDA)
    assert layers["device_used_bytes"] == 6 * GIB
    assert layers["outside_pytorch_bytes"] == 2 * GIB
    assert layers["nvidia_smi_used_bytes"] == 7 * GIB
    assert layers["nccl_is_running"] is False
    assert (layers["peak_allocated_bytes"], layers["alloc_retries"]) == (5 * GIB, 2)


@pytest.mark.usefixtures("gpu")
def test_a_counter_that_this_torch_does_not_keep_is_none() -> None:
    assert accounting.account(CUDA)["requested_bytes"] is None


def test_the_driver_is_asked_for_the_whole_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    nvml = FakeNvml(FakeGpu(memory_used=5 * GIB))
    assert accounting.nvidia_smi_used_bytes(0, nvml) == 5 * GIB
    assert accounting.nvidia_smi_used_bytes(1, nvml) is None
    assert accounting.nvidia_smi_used_bytes(0, FakeNvml(library=False)) is None
    silent = FakeNvml(FakeGpu(unanswered={"memory"}))
    assert accounting.nvidia_smi_used_bytes(0, silent) is None


def test_a_cpu_has_a_process() -> None:
    assert accounting.account(torch.device("cpu"))["resident_bytes"] > 10 * 2**20
