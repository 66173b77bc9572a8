"""Every layer between nvidia-smi and the bytes of tensors, and those by purpose."""

import sys
from typing import Any

import psutil
import pytest
import torch

from lmlab.measure.memory import accounting
from lmlab.measure.memory.accounting import device_bytes, gradients, process_bytes, storage_bytes
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


def test_the_driver_reports_the_gpu_or_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    unknown = FakeNvml(library=False), FakeNvml(FakeGpu(unanswered={"memory"})), FakeNvml()
    for nvml, used in ((FakeNvml(FakeGpu(memory_used=5)), 5), *((each, None) for each in unknown)):
        monkeypatch.setitem(sys.modules, "pynvml", nvml)
        assert accounting.nvidia_smi_used_bytes(0) == used
    assert process_bytes(FakeNvml(), FakeGpu(pids=[6, 7], memory_used=5), 7) == 5
    assert process_bytes(FakeNvml(), FakeGpu(pids=[6]), 7) is None, "hidden in a container"
    assert process_bytes(FakeNvml(), FakeGpu(unanswered={"processes"}), 7) is None


CPU = torch.device("cpu")


def test_views_count_as_their_whole_storage_once_and_only_on_their_device() -> None:
    buffer = torch.zeros(100)
    tensors = [buffer[:10], buffer[50:], torch.zeros(5)]
    assert storage_bytes(tensors, CPU) == 420
    assert storage_bytes(tensors, torch.device("cuda")) == 0


def test_the_optimizers_tensors_and_the_gradients_are_found() -> None:
    parameter = torch.nn.Parameter(torch.zeros(10))
    optimizer = torch.optim.AdamW([parameter])
    assert list(gradients([parameter])) == []
    parameter.grad = torch.ones(10)
    optimizer.step()
    moments = 2 * 40 + 4  # two per weight, and the step counter
    assert storage_bytes(accounting.optimizer_tensors(optimizer.state), CPU) == moments
    assert storage_bytes(gradients([parameter]), CPU) == 40


def test_a_reading_adds_up() -> None:
    parts = {"parameters": [torch.zeros(8)], "gradients": [torch.zeros(2)]}
    reading = accounting.read_memory(CPU, parts, activations=100)
    assert reading["allocated_bytes"] == 32 + 8 + 100
    assert reading["parts_bytes"] == {
        "parameters": 32, "gradients": 8, "activations": 100, "other": 0
    }  # fmt: skip
    assert reading["reserved_bytes"] is None
    assert reading["device_scope"] == "process"
    assert accounting.account(CPU)["resident_bytes"] > 10 * 2**20
    assert device_bytes(CPU)[0] == pytest.approx(psutil.Process().memory_info().rss, rel=0.05)
