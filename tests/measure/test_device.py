"""Devices by name, memory that runs out, threads that are really used."""

from __future__ import annotations

import os

import pytest
import torch

from lmlab.measure.device import (
    DeviceError,
    is_out_of_memory,
    peak_memory_bytes,
    reset_peak_memory,
    set_threads,
    torch_device,
)

CPU = torch.device("cpu")


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)


@pytest.mark.usefixtures("no_gpu")
def test_auto_without_a_gpu_is_the_cpu() -> None:
    assert torch_device("auto") == CPU


@pytest.mark.usefixtures("no_gpu")
def test_asking_for_a_gpu_that_is_not_there_is_one_clear_line() -> None:
    with pytest.raises(DeviceError, match=r"^device: got 'cuda', but PyTorch finds no CUDA GPU"):
        torch_device("cuda")


@pytest.mark.parametrize("name", ["auto", "cuda"])
def test_with_a_gpu_auto_is_the_gpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    assert torch_device(name) == torch.device("cuda", 0)
    assert os.environ["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert torch_device("cpu") == CPU


def test_an_unknown_device_names_those_that_are_known() -> None:
    with pytest.raises(DeviceError, match=r"^device: got 'tpu', allowed are auto, cuda, cpu$"):
        torch_device("tpu")


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        pytest.param(torch.OutOfMemoryError("CUDA out of memory."), True, id="torch"),
        pytest.param(MemoryError(), True, id="python"),
        pytest.param(RuntimeError("CUDA error: out of memory"), True, id="driver"),
        pytest.param(RuntimeError("x CUBLAS_STATUS_ALLOC_FAILED y"), True, id="cublas"),
        pytest.param(RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False, id="shapes"),
        pytest.param(ValueError("CUDA error: out of memory"), False, id="a-quoted-message"),
    ],
)
def test_out_of_memory_is_known_in_every_dress(error: BaseException, expected: bool) -> None:
    assert is_out_of_memory(error) is expected


def test_a_tensor_larger_than_any_memory_is_out_of_memory() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**50, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)


def test_a_cpu_has_no_peak_memory() -> None:
    reset_peak_memory(CPU)
    assert peak_memory_bytes(CPU) is None


def test_all_usable_cores_are_used_whatever_was_set_before() -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        assert set_threads() == len(os.sched_getaffinity(0)) == torch.get_num_threads()
    finally:
        torch.set_num_threads(before)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_a_gpus_peak_counts_from_the_reset() -> None:
    device = torch.device("cuda", 0)
    torch.empty(2**24, dtype=torch.uint8, device=device)
    reset_peak_memory(device)
    start = peak_memory_bytes(device)
    torch.empty(2**23, dtype=torch.uint8, device=device)
    assert start is not None
    assert peak_memory_bytes(device) == start + 2**23


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_a_gpu_that_runs_out_says_so() -> None:
    with pytest.raises(torch.OutOfMemoryError) as caught:
        torch.empty(2**45, dtype=torch.uint8, device="cuda")
    assert is_out_of_memory(caught.value)
