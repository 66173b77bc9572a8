"""Predicted bytes are those that autograd saves and that exist at the peak."""

import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from lmlab.model.activations import saved_activations
from lmlab.model.adamw import AdamW
from lmlab.model.footprint import memory
from lmlab.model.loss import cross_entropy
from lmlab.model.peak import predicted_peak
from lmlab.model.shape import ModelShape
from lmlab.model.transformer import TransformerLM
from tests.model.model_shapes import SMALL, build, shape_of, shapes
from tests.new_tensors import NewTensors

SHAPES = {
    "wide_feed_forward": shape_of(2, 32, 64, 256, 2, 4, 100),
    "wide_logits": shape_of(2, 64, 32, 96, 3, 2, 500),
    "wide_scores": shape_of(2, 128, 32, 64, 2, 4, 64),
    "many_parameters": shape_of(1, 8, 64, 256, 2, 4, 50),
}


def batch_for(shape: ModelShape) -> tuple[Tensor, Tensor]:
    size = (shape.batch, shape.context)
    return torch.randint(shape.vocab_size, size), torch.randint(shape.vocab_size, size)


def forward(model: TransformerLM, tokens: Tensor, precision: str) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bf16"):
        logits: Tensor = model(tokens)
    return logits


def bytes_saved_by_autograd(shape: ModelShape, precision: str) -> int:
    """Bytes that a forward pass saves for backward, without the model's own tensors."""
    model, (tokens, targets) = build(shape, device="cpu"), batch_for(shape)
    owned = {t.untyped_storage().data_ptr() for t in [*model.parameters(), *model.buffers()]}
    saved: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        # The graph must outlive the count, or addresses would be reused.
        loss = cross_entropy(forward(model, tokens, precision), targets)
    total = sum(t.untyped_storage().nbytes() for key, t in saved.items() if key not in owned)
    loss.backward()
    return total


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@settings(max_examples=10)
@given(shape=shapes)
def test_saved_bytes_are_those_that_autograd_saves(precision: Any, shape: ModelShape) -> None:
    predicted = memory(shape, precision, "forward_backward", device="cpu")
    saved = predicted.activations + predicted.autocast_weights + predicted.inputs
    assert saved == bytes_saved_by_autograd(shape, precision)


class LiveBytes:
    """Counts the bytes of live tensors, and the most there were; not a backend's scratch memory."""

    def __init__(self, *existing: Tensor) -> None:
        self.now = self.peak = 0
        self.known: set[int] = set()
        for tensor in existing:
            self.count(tensor)

    def count(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata not in self.known:
            self.known.add(storage._cdata)
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self.forget, storage._cdata, storage.nbytes())

    def forget(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.now -= size


def measured_peak(shape: ModelShape, precision: str, mode: str) -> int:
    """Most bytes alive during the second step, when the optimizer state already exists."""
    model, (tokens, targets) = build(shape, device="cpu"), batch_for(shape)
    optimizer = AdamW(model.parameters())

    def step() -> None:
        if mode == "forward":
            with torch.no_grad():
                forward(model, tokens, precision)
            return
        cross_entropy(forward(model, tokens, precision), targets).backward()
        if mode == "train_step":
            optimizer.step()

    step()
    optimizer.zero_grad(set_to_none=True)
    state = [t for s in optimizer.state.values() for t in s.values() if isinstance(t, Tensor)]
    inputs = [tokens] if mode == "forward" else [tokens, targets]
    live = LiveBytes(*model.parameters(), *model.buffers(), *state, *inputs)
    with NewTensors(live.count):
        step()
    return live.peak


@pytest.mark.parametrize("mode", ["forward", "forward_backward", "train_step"])
@pytest.mark.parametrize("precision", ["fp32", pytest.param("bf16", marks=pytest.mark.slow)])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_the_peak_is_the_measured_one(shape: ModelShape, precision: Any, mode: Any) -> None:
    stage = predicted_peak(shape, precision, mode, device="cpu")
    assert memory(shape, precision, mode, device="cpu").peak == stage.parts.total
    expected = stage.parts.total
    if (precision, stage.name) == ("bf16", "loss"):
        # A CPU casts the logits into a copy inside a kernel, where it cannot be observed.
        expected -= 2 * shape.tokens * shape.vocab_size
    assert expected == pytest.approx(measured_peak(shape, precision, mode), rel=0.02)


def test_the_small_model_by_hand() -> None:
    parts = memory(SMALL, "fp32", "train_step")
    assert parts.parameters == parts.gradients == 4 * 128_625_408
    assert parts.optimizer_state == 8 * 128_625_408
    assert parts.buffers == 2 * 4 * 128 * 64
    assert parts.inputs == 2 * 8 * 512
    assert parts.autocast_weights == 0
    inference = memory(SMALL, "bf16", "forward")
    assert (inference.gradients, inference.optimizer_state, inference.activations) == (0, 0, 0)
    assert inference.autocast_weights == 2 * (128_625_408 - 7_680_000 - 19_200)


def test_precisions_differ_by_their_width_and_by_what_autocast_saves_on_a_gpu() -> None:
    for one, other in (("fp32", "tf32"), ("bf16", "fp16")):  # of equal width
        assert memory(SMALL, one, "train_step") == memory(SMALL, other, "train_step")
    on_gpu = saved_activations(SMALL, "bf16", device="cuda")
    assert on_gpu - saved_activations(SMALL, "bf16", device="cpu") == 4 * 12 * SMALL.scores


@pytest.mark.parametrize(
    ("changes", "mode", "phase", "name"),
    [
        ({}, "forward_graph", "forward", "loss"),
        ({"context": 4096, "vocab_size": 100}, "forward_graph", "forward", "softmax"),
        ({"context": 8, "batch": 1}, "train_step", "optimizer", "update of the largest parameter"),
    ],
    ids=["short", "long", "few_tokens"],
)
def test_where_the_peak_is(changes: dict[str, int], mode: Any, phase: str, name: str) -> None:
    stage = predicted_peak(replace(SMALL, **changes), "bf16", mode)
    assert (stage.phase, stage.name) == (phase, name)
    assert stage.parts.gradients == (stage.parts.parameters if phase == "optimizer" else 0)
    assert (stage.parts.weight_copies > 0) == (phase == "forward")


@pytest.mark.parametrize(("name", "value"), [("precision", "x"), ("mode", "x"), ("device", "tpu")])
def test_unknown_names_are_rejected(name: str, value: str) -> None:
    arguments: Any = {"precision": "fp32", "mode": "forward", "device": "cuda", name: value}
    with pytest.raises(ValueError, match=f"^{name} must be one of .*, got '{value}'$"):
        memory(SMALL, **arguments)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_peak_on_a_gpu_is_within_a_tenth(precision: Any) -> None:
    shape = shape_of(4, 512, 1024, 4096, 4, 16, 10_000)
    model = build(shape, device="cuda")
    tokens = torch.randint(10_000, (4, 512), device="cuda")
    torch.cuda.reset_peak_memory_stats()
    with torch.autocast("cuda", dtype=torch.bfloat16, enabled=precision == "bf16"):
        loss = cross_entropy(model(tokens), tokens.clone())
    loss.backward()
    predicted = memory(shape, precision, "forward_backward").peak
    assert predicted == pytest.approx(torch.cuda.max_memory_allocated(), rel=0.1)
