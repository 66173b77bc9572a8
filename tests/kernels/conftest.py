"""A GPU that compiles and never runs: Triton's real compiler behind a driver that only records."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from lmlab.kernels import launch, problem, step
from lmlab.kernels.problem import DeviceInfo, Problem
from tests.attention.reference import Tensors

KIB, MIB = 2**10, 2**20
CAPABILITY = {"ampere": 80, "ada": 89, "hopper": 90, "blackwell": 100}
DEVICES = {
    "ampere": DeviceInfo("ampere", 108, 163 * KIB, 40 * MIB),
    "ada": DeviceInfo("ada", 128, 99 * KIB, 72 * MIB),
    "hopper": DeviceInfo("hopper", 132, 227 * KIB, 60 * MIB),
    "blackwell": DeviceInfo("blackwell", 148, 227 * KIB, 126 * MIB),
}
GPU = torch.device("cuda", 0)
SIXTEEN_HEADS = Problem(
    GPU, torch.bfloat16, batch=1, heads=16, kv_heads=16, queries=16384, keys=16384, head_dim=64,
    is_causal=True, tf32=False, direction="forward",
)  # fmt: skip
SetDevice = Callable[[DeviceInfo], None]


@pytest.fixture
def set_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[SetDevice]:
    """Make the host code plan for another device than the tensors'."""

    def install(info: DeviceInfo) -> None:
        monkeypatch.setattr(problem, "device_info", lambda device: info)
        launch.forget_calls()

    yield install
    launch.forget_calls()


def run(inputs: Tensors, is_causal: bool, forward: Any = None, backward: Any = None) -> Tensors:
    """Output, log-sum-exp and gradients by the kernels, with these tiles or their own choice."""
    q, k, v, grad_o = inputs
    options: Any = {"is_causal": is_causal, "scale": q.shape[-1] ** -0.5}
    o, lse = launch.forward(q, k, v, tiles=forward, **options)
    return o, lse, *launch.backward(grad_o, q, k, v, o, lse, tiles=backward, **options)


class FakeGpu:
    """A Triton driver that launches nothing; keeps compiled kernels and launch arguments."""

    def __init__(self, set_device: SetDevice) -> None:
        self.utils = self
        self.launched: list[tuple[Any, ...]] = []
        self.compiled: list[tuple[str, Any]] = []
        """Name and kernel, each time Triton was asked to launch one."""
        self._set_device = set_device
        self.become("hopper")

    def become(self, architecture: str) -> None:
        self.architecture = architecture
        self._set_device(DEVICES[architecture])

    def launcher_cls(self, source: object, metadata: object) -> Any:
        # The seventh argument is for profilers, and new each time.
        return lambda *arguments: self.launched.append((*arguments[:6], *arguments[7:]))

    def load_binary(self, *arguments: object) -> tuple[int, ...]:
        return 1, 1, 32, 0, 1024

    def unload_module(self, module: int) -> None:
        """Called by newer versions of Triton."""

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 227 * KIB, "max_num_regs": 65_536, "warpSize": 32}

    def get_current_device(self) -> int:
        return CAPABILITY[self.architecture]  # Triton caches kernels by this number

    def get_current_stream(self, device: int) -> int:
        return 7

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", CAPABILITY[self.architecture], 32)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, set_device: SetDevice) -> Iterator[FakeGpu]:
    """Launches of tensors on the CPU go to a fake GPU, by default a Hopper."""
    fake, run, used = FakeGpu(set_device), JITFunction.run, set()

    def recorded(kernel: Any, *arguments: Any, **options: Any) -> Any:
        compiled = run(kernel, *arguments, **options)
        fake.compiled.append((kernel.fn.__name__, compiled))
        used.add(kernel)
        return compiled

    monkeypatch.setattr(driver, "_active", fake)
    monkeypatch.setattr(JITFunction, "run", recorded)
    monkeypatch.setattr(step, "kernel_for", lambda kernel, device: kernel)
    monkeypatch.setattr(launch, "term_dtype", lambda device: torch.bfloat16)
    launch.forget_calls()
    yield fake
    for kernel in used:
        for capability in CAPABILITY.values():
            kernel.device_caches.pop(capability, None)
