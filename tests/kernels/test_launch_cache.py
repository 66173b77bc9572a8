"""A cached launch passes what Triton would have passed, without asking it again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lmlab.kernels import launch, launch_cache
from lmlab.kernels.configs import Tiles
from lmlab.kernels.problem import Problem
from tests.kernels.conftest import FakeGpu

pytestmark = pytest.mark.slow

TILES = Tiles(block_m=64, block_n=64, warps=4, stages=2, splits=1)


def tensors(count: int) -> tuple[Tensor, ...]:
    return tuple(torch.zeros(2, 3, 64, 64, dtype=torch.float16) for _ in range(count))


def are_equal(ours: tuple[Any, ...], theirs: tuple[Any, ...]) -> bool:
    return len(ours) == len(theirs) and all(
        a is b or (not isinstance(a, Tensor) and a == b) for a, b in zip(ours, theirs, strict=True)
    )


def test_forward_and_backward_are_relaunched_with_the_same_arguments(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k, v, o, grad_o, *grads = tensors(8)
    lse, delta = torch.zeros(2, 3, 64), torch.zeros(2, 3, 64)
    monkeypatch.setattr(launch, "_empty_delta", lambda problem, o: delta)
    problem = Problem.of(q, k, True)

    def once() -> None:
        launch.launch_forward(problem, (q, k, v), (o, lse), 0.125, TILES)
        inputs = grad_o, q, k, v, o, lse
        launch.launch_backward(problem, inputs, tuple(grads), 0.125, TILES)

    once()
    by_triton = gpu.launched.copy()
    once()

    relaunched = gpu.launched[len(by_triton) :]
    names = [name for name, _ in gpu.compiled]
    assert names == ["flash_forward_kernel", "delta_kernel", "flash_backward_kernel"]
    assert len(relaunched) == len(by_triton) == len(names)
    assert all(map(are_equal, relaunched, by_triton))


def compute_delta(o: Tensor, grad_o: Tensor) -> None:
    launch.launch_delta(Problem.of(o, o, True), grad_o, o)


def test_triton_is_asked_whenever_it_would_compile_again(gpu: FakeGpu) -> None:
    o, grad_o = tensors(2)
    strided = torch.zeros(2, 3, 64, 72, dtype=torch.float16)[..., :64]
    longer = torch.zeros(2, 3, 80, 64, dtype=torch.float16)
    misaligned = torch.zeros(o.numel() + 1, dtype=torch.float16)[1:].view(o.shape)

    for pair in ((o, grad_o), (o, strided), (longer, longer)):
        for _ in range(2):
            compute_delta(*pair)
    assert len(gpu.compiled) == 3
    assert len(gpu.launched) == 6

    for _ in range(2):
        compute_delta(o, misaligned)
    assert len(gpu.compiled) == 5


def test_ever_new_shapes_do_not_fill_memory(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_cache, "MAX_ENTRIES", 2)
    for length in (32, 48, 64, 80, 96):
        o = torch.zeros(1, 1, length, 64, dtype=torch.float16)
        compute_delta(o, o)

    assert len(launch_cache._entries) <= 2
