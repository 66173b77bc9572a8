"""Devices by name, out-of-memory errors, threads."""

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

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("name", "has_gpu", "expected"),
    [
        *(("auto", False, CPU), ("auto", True, GPU), ("cuda", True, GPU), ("cpu", True, CPU)),
        *(("cuda", False, None), ("tpu", True, None)),
    ],
)
def test_devices_are_selected_by_name(
    name: str, has_gpu: bool, expected: torch.device | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: has_gpu)
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "")
    monkeypatch.delenv("CUDA_DEVICE_ORDER")
    if expected is None:
        with pytest.raises(DeviceError, match=rf"^device = '{name}'[;,] [^\n]*allowed"):
            torch_device(name)
        return
    assert torch_device(name) == expected
    if expected == GPU:
        assert os.environ["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("CUDA out of memory."), True),
        (MemoryError(), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("x CUBLAS_STATUS_ALLOC_FAILED y"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("CUDA error: out of memory"), False),
    ],
    ids=repr,
)
def test_every_form_of_out_of_memory_is_recognized(error: BaseException, expected: bool) -> None:
    assert is_out_of_memory(error) is expected


@pytest.mark.parametrize(
    "device",
    [
        CPU,
        pytest.param(
            GPU,
            marks=[
                pytest.mark.gpu,
                pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
            ],
        ),
    ],
    ids=str,
)
def test_a_gpus_peak_counts_from_the_reset_and_too_large_a_tensor_is_out_of_memory(
    device: torch.device,
) -> None:
    torch.empty(2**24, dtype=torch.uint8, device=device)
    reset_peak_memory(device)
    start = peak_memory_bytes(device)
    torch.empty(2**23, dtype=torch.uint8, device=device)
    assert peak_memory_bytes(device) == (None if start is None else start + 2**23)
    assert (start is None) == (device == CPU), "a CPU has no counter"
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**50, dtype=torch.uint8, device=device)
    assert is_out_of_memory(caught.value)


def test_all_usable_cores_are_used_whatever_was_set_before() -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        assert set_threads() == len(os.sched_getaffinity(0)) == torch.get_num_threads()
    finally:
        torch.set_num_threads(before)
