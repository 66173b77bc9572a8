"""A remembered launch reaches the GPU with what Triton would have passed, and asks it no more.

No GPU takes part: a driver that only writes down stands in for it, the compiler is the real one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from lmlab.kernels import launch, problem, relaunch
from lmlab.kernels.configs import Tiles
from lmlab.kernels.flash_delta import delta_kernel
from lmlab.kernels.problem import Problem, Processor

pytestmark = pytest.mark.slow

DEVICE = 99
"""A number that no GPU has: Triton keeps what it compiled by device."""
TILES = Tiles(kept=64, walked=32, warps=4, stages=2, splits=1)


class Recorder:
    """What stands for a driver: it launches nothing and keeps the arguments."""

    def __init__(self) -> None:
        self.launched: list[tuple[Any, ...]] = []
        self.utils = self

    def launcher_cls(self, source: object, metadata: object) -> Any:
        # The seventh is for profilers, and made anew each time.
        return lambda *arguments: self.launched.append((*arguments[:6], *arguments[7:]))

    def load_binary(self, *arguments: object) -> tuple[int, ...]:
        return 1, 1, 32, 0, 1024

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 232_448, "max_num_regs": 65_536, "warpSize": 32}

    def get_current_device(self) -> int:
        return DEVICE

    def get_current_stream(self, device: int) -> int:
        return 7

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorder]:
    recorder = Recorder()
    monkeypatch.setattr(driver, "_active", recorder)  # going back by its method needs a GPU
    hopper = Processor("hopper", 132, 232_448, 50 * 2**20)
    for module in (launch, problem):
        monkeypatch.setattr(module, "processor", lambda device: hopper)
    monkeypatch.setattr(launch, "kernel_for", lambda kernel, device: kernel)
    monkeypatch.setattr(launch, "_on", lambda device: nullcontext())
    monkeypatch.setattr(relaunch, "_known", {})
    yield recorder
    for kernel in (launch.flash_forward_kernel, launch.flash_backward_kernel, delta_kernel):
        kernel.device_caches.pop(DEVICE, None)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Kernels whose launch Triton was asked for."""
    names: list[str] = []
    run = JITFunction.run

    def counted(kernel: Any, *arguments: Any, **options: Any) -> Any:
        names.append(kernel.fn.__name__)
        return run(kernel, *arguments, **options)

    monkeypatch.setattr(JITFunction, "run", counted)
    return names


def tensors(count: int) -> tuple[Tensor, ...]:
    return tuple(torch.zeros(2, 3, 64, 64, dtype=torch.float16) for _ in range(count))


def are_the_same(ours: tuple[Any, ...], theirs: tuple[Any, ...]) -> bool:
    return len(ours) == len(theirs) and all(
        a is b or (not isinstance(a, Tensor) and a == b) for a, b in zip(ours, theirs, strict=True)
    )


@pytest.mark.parametrize("own_delta", [False, True])
def test_forward_and_backward_are_launched_again_with_the_same_arguments(
    own_delta: bool, gpu: Recorder, asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k, v, o, grad_o, *grads = tensors(8)
    lse, delta = torch.zeros(2, 3, 64), torch.zeros(2, 3, 64)
    monkeypatch.setattr(launch, "_empty_delta", lambda problem, o: delta)
    case = Problem.of(q, k, True)
    tiles = replace(TILES, own_delta=own_delta)

    def once() -> None:
        launch.launch_forward(case, q, k, v, o, lse, 0.125, tiles)
        launch.launch_backward(case, grad_o, q, k, v, o, lse, tuple(grads), 0.125, tiles)

    once()
    by_triton = gpu.launched.copy()
    once()

    again = gpu.launched[len(by_triton) :]
    before = [] if own_delta else ["delta_kernel"]
    assert asked == ["flash_forward_kernel", *before, "flash_backward_kernel"]
    assert len(again) == len(by_triton) == len(asked)
    assert all(map(are_the_same, again, by_triton))


def delta(o: Tensor, grad_o: Tensor) -> None:
    launch.launch_delta(Problem.of(o, o, True), grad_o, o)


def test_what_triton_would_compile_anew_is_asked_for_anew(gpu: Recorder, asked: list[str]) -> None:
    o, grad_o = tensors(2)
    apart = torch.zeros(2, 3, 64, 72, dtype=torch.float16)[..., :64]
    longer = torch.zeros(2, 3, 80, 64, dtype=torch.float16)

    for given in ((o, grad_o), (o, apart), (longer, longer)):
        for _ in range(2):
            delta(*given)

    assert asked == 3 * ["delta_kernel"]
    assert len(gpu.launched) == 6


def test_pointers_that_lie_elsewhere_are_always_asked_for(gpu: Recorder, asked: list[str]) -> None:
    o, grad_o = tensors(2)
    odd = torch.zeros(o.numel() + 1, dtype=torch.float16)[1:].view(o.shape)

    for given in (grad_o, odd, odd, grad_o):
        delta(o, given)

    assert asked == 3 * ["delta_kernel"]


def test_ever_new_shapes_fill_no_memory(
    gpu: Recorder, asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relaunch, "REMEMBERED_AT_MOST", 2)
    for length in (32, 48, 64, 80, 96):
        o = torch.zeros(1, 1, length, 64, dtype=torch.float16)
        delta(o, o)

    assert len(relaunch._known) <= 2
