"""Devices and precisions by name, out-of-memory errors, threads, and locks of devices."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lmlab.measure import device as devices
from lmlab.measure import exclusive as module
from lmlab.measure import precision
from lmlab.measure.exclusive import exclusive, lock_names
from lmlab.measure.precision import PRECISIONS, PrecisionError, tf32_allowed, why_unsupported
from tests.measure.fake_nvml import FakeGpu, FakeNvml

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
        with pytest.raises(devices.DeviceError, match=rf"^device = '{name}'[;,] [^\n]*allowed"):
            devices.torch_device(name)
        return
    assert devices.torch_device(name) == expected
    if expected == GPU:
        assert os.environ["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"


def test_every_form_of_out_of_memory_is_recognized() -> None:
    messages = "CUDA error: out of memory", "x CUBLAS_STATUS_ALLOC_FAILED y"
    errors = [torch.OutOfMemoryError("CUDA out of memory."), MemoryError()]
    assert all(map(devices.is_out_of_memory, [*errors, *map(RuntimeError, messages)]))
    others = RuntimeError("mat1 and mat2 shapes cannot be multiplied"), ValueError(messages[0])
    assert not any(map(devices.is_out_of_memory, others))


@pytest.mark.parametrize("device", [CPU, pytest.param(GPU, marks=pytest.mark.gpu)], ids=str)
def test_peak_memory_and_too_large_a_tensor(device: torch.device) -> None:
    torch.empty(2**24, dtype=torch.uint8, device=device)
    devices.reset_peak_memory(device)
    start = devices.peak_memory_bytes(device)
    torch.empty(2**23, dtype=torch.uint8, device=device)
    assert devices.peak_memory_bytes(device) == (None if start is None else start + 2**23)
    assert (start is None) == (device == CPU), "a CPU has no counter"
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**50, dtype=torch.uint8, device=device)
    assert devices.is_out_of_memory(caught.value)


def test_all_usable_cores_are_used_whatever_was_set_before() -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        assert devices.set_threads() == len(os.sched_getaffinity(0)) == torch.get_num_threads()
    finally:
        torch.set_num_threads(before)


BACKENDS: Any = torch.backends


def switches() -> list[str]:
    return [
        torch.get_float32_matmul_precision(),
        BACKENDS.cuda.matmul.fp32_precision,
        BACKENDS.mkldnn.matmul.fp32_precision,
        BACKENDS.cudnn.conv.fp32_precision,
        BACKENDS.cudnn.rnn.fp32_precision,
    ]


@pytest.mark.parametrize("name", PRECISIONS)
def test_tf32_is_on_only_for_tf32(name: str) -> None:
    with tf32_allowed(name != "tf32"), tf32_allowed(PRECISIONS[name].tf32):
        assert torch.backends.cuda.matmul.allow_tf32 is (name == "tf32")
        assert torch.backends.cudnn.allow_tf32 is (name == "tf32")


@pytest.mark.parametrize("allowed", [True, False])
@pytest.mark.parametrize("newer_interface", [True, False])
def test_every_switch_is_restored(allowed: bool, newer_interface: bool) -> None:
    untouched = BACKENDS.cudnn.conv.fp32_precision
    if newer_interface:
        BACKENDS.cudnn.conv.fp32_precision = "ieee"
    try:
        before = switches()
        with pytest.raises(RuntimeError, match="inside"), tf32_allowed(allowed):
            raise RuntimeError("inside")
        assert switches() == before
    finally:
        BACKENDS.cudnn.conv.fp32_precision = untouched


@pytest.mark.parametrize(
    ("capability", "unsupported"), [(None, {"tf32"}), ((7, 5), {"tf32", "bf16"}), ((9, 0), set())]
)
def test_support_depends_on_the_device(
    capability: tuple[int, int] | None, unsupported: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    device = CPU if capability is None else GPU
    assert {name for name in PRECISIONS if why_unsupported(name, device)} == unsupported
    with pytest.raises(PrecisionError, match=r"^precision = 'fp64'; allowed: [^\n]*fp32[^\n]*$"):
        precision.precision_named("fp64")


@pytest.mark.gpu
def test_fp32_on_a_gpu_is_many_times_more_accurate_than_tf32() -> None:
    a, b = (torch.randn(1024, 1024, device="cuda") for _ in range(2))
    exact = a.double() @ b.double()
    error = {}
    for name in ("fp32", "tf32"):
        with tf32_allowed(PRECISIONS[name].tf32):
            error[name] = float((a @ b - exact).abs().max())
    assert error["fp32"] * 30 < error["tf32"]


HOLDS_UNTIL_STDIN_CLOSES = """
import sys
from lmlab.measure.exclusive import exclusive
with exclusive("device"):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def _own_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LMLAB_LOCK_DOMAIN", tmp_path.name)


@pytest.fixture
def holder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[subprocess.Popen[str]]:
    """A process with another temporary folder that has the device until it is killed."""
    with monkeypatch.context() as context:
        context.setenv("TMPDIR", str(tmp_path))
        command = [sys.executable, "-c", HOLDS_UNTIL_STDIN_CLOSES]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        process = subprocess.Popen(command, text=True, **pipes)  # type: ignore[call-overload]
    with process:
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_a_second_process_waits_and_names_the_first_once(
    holder: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def said(*words: str, **_: object) -> None:
        """While it waits, the holder dies, and leaves no lock behind."""
        lines.append(" ".join(words))
        holder.kill()

    lines: list[str] = []
    monkeypatch.setattr(module, "_SILENT_WAIT_S", 0.001)
    monkeypatch.setattr(module, "print", said, raising=False)
    with exclusive("device"):
        assert len(lines) == 1
        assert f"process {holder.pid}" in lines[0]


def test_locks_are_per_device_and_released_after_an_error() -> None:
    with pytest.raises(RuntimeError, match="inside"), exclusive("one"), exclusive("two"):
        raise RuntimeError("inside")
    with exclusive("one"):
        pass


def test_gpus_are_known_by_their_ids_under_any_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs that are given different GPUs of a node measure side by side."""
    gpus = FakeNvml(FakeGpu(uuid="GPU-b"), FakeGpu(uuid="GPU-a"), FakeGpu(uuid="GPU-c"))
    monkeypatch.setitem(sys.modules, "pynvml", gpus)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,2")
    assert lock_names("cuda", 1) == ["GPU-a"]
    assert lock_names("cuda", 2) == ["GPU-a", "GPU-c"]
    assert lock_names("cpu", 2) == ["cpu"]
