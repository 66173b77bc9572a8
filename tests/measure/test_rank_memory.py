"""Bytes by what they are for: shared memory once, saved activations as the cost model has them."""

from __future__ import annotations

from types import SimpleNamespace

import psutil
import pytest
import torch

from lmlab.measure.rank_memory import (
    Saved,
    device_bytes,
    gradients,
    optimizer_tensors,
    own_bytes,
    read_memory,
    storage_bytes,
)
from lmlab.model.footprint import saved_activations
from lmlab.model.loss import cross_entropy
from lmlab.model.shape import ModelShape
from tests.model.model_shapes import build

CPU = torch.device("cpu")
SHAPE = ModelShape(
    vocab_size=50, context=16, batch=2, d_model=32, d_ff=48, num_layers=2, num_heads=2
)


def test_views_of_one_buffer_count_once_and_as_a_whole() -> None:
    buffer = torch.zeros(100)
    assert storage_bytes([buffer[:10], buffer[50:], torch.zeros(5)], CPU) == 420


def test_what_lies_elsewhere_is_not_counted() -> None:
    assert storage_bytes([torch.zeros(5)], torch.device("cuda")) == 0


def test_an_optimizers_tensors_are_found() -> None:
    parameter = torch.nn.Parameter(torch.zeros(10))
    optimizer = torch.optim.AdamW([parameter])
    assert list(gradients([parameter])) == []
    parameter.grad = torch.ones(10)
    optimizer.step()
    moments = 2 * 40 + 4  # two a weight and the step
    assert storage_bytes(optimizer_tensors(optimizer.state), CPU) == moments
    assert storage_bytes(gradients([parameter]), CPU) == 40


def test_saved_bytes_are_those_of_the_cost_model() -> None:
    model = build(SHAPE, device="cpu")
    tokens, targets = (torch.randint(SHAPE.vocab_size, (SHAPE.batch, SHAPE.context)) for _ in "ab")
    saved = Saved([*model.buffers(), tokens, targets])
    with saved.counting():
        loss = cross_entropy(model(tokens), targets)
    assert saved.nbytes == saved_activations(SHAPE, "fp32", device="cpu")
    loss.backward()


def test_a_reading_adds_up() -> None:
    parts = {"parameters": [torch.zeros(8)], "gradients": [torch.zeros(2)]}
    reading = read_memory(CPU, parts, activations=100)
    assert reading["allocated_bytes"] == 32 + 8 + 100
    assert reading["parts_bytes"] == {
        "parameters": 32, "gradients": 8, "activations": 100, "other": 0
    }  # fmt: skip
    assert reading["reserved_bytes"] is None
    assert reading["device_scope"] == "process"


def test_a_cpu_reports_resident_memory() -> None:
    assert device_bytes(CPU)[0] == pytest.approx(psutil.Process().memory_info().rss, rel=0.05)


def test_a_process_is_found_among_those_of_a_gpu() -> None:
    listed = [SimpleNamespace(pid=7, usedGpuMemory=5), SimpleNamespace(pid=8, usedGpuMemory=None)]
    assert own_bytes(listed, 7) == 5
    assert own_bytes(listed, 8) is None, "a container hides the number"
    assert own_bytes(listed, 9) is None
