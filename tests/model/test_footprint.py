"""Predicted bytes are those that autograd saves and that are alive at the peak."""

import weakref
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lmlab.model.adamw import AdamW
from lmlab.model.footprint import memory, saved_activations
from lmlab.model.loss import cross_entropy
from lmlab.model.shape import ModelShape
from lmlab.model.transformer import TransformerLM
from tests.model.model_shapes import SMALL, build, shapes


def shape_of(
    batch: int, context: int, d_model: int, d_ff: int, num_layers: int, num_heads: int, vocab: int
) -> ModelShape:
    return ModelShape(
        vocab_size=vocab,
        context=context,
        batch=batch,
        d_model=d_model,
        d_ff=d_ff,
        num_layers=num_layers,
        num_heads=num_heads,
    )


SHAPES = {
    "feed-forward is widest": shape_of(4, 32, 64, 256, 2, 4, 100),
    "logits are widest": shape_of(2, 64, 32, 96, 3, 2, 500),
    "scores are widest": shape_of(4, 128, 32, 64, 2, 4, 64),
    "parameters are most": shape_of(1, 8, 64, 256, 2, 4, 50),
}


def batch_for(shape: ModelShape) -> tuple[Tensor, Tensor]:
    size = (shape.batch, shape.context)
    return torch.randint(shape.vocab_size, size), torch.randint(shape.vocab_size, size)


def forward(model: TransformerLM, tokens: Tensor, precision: str) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bf16"):
        return model(tokens)


def forward_and_loss(model: TransformerLM, batch: tuple[Tensor, Tensor], precision: str) -> Tensor:
    return cross_entropy(forward(model, batch[0], precision), batch[1])


def bytes_saved_by_autograd(shape: ModelShape, precision: str) -> int:
    """Bytes of all storages that a forward pass leaves for backward, the model's own excepted."""
    model, batch = build(shape, device="cpu"), batch_for(shape)
    owned = {t.untyped_storage().data_ptr() for t in [*model.parameters(), *model.buffers()]}
    saved: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        # The graph must outlive the count, or addresses would be used twice.
        loss = forward_and_loss(model, batch, precision)
    total = sum(t.untyped_storage().nbytes() for key, t in saved.items() if key not in owned)
    loss.backward()
    return total


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@settings(deadline=None, max_examples=15)
@given(shape=shapes)
def test_saved_bytes_are_those_that_autograd_saves(precision: Any, shape: ModelShape) -> None:
    predicted = memory(shape, precision, "forward_backward", device="cpu")

    held = predicted.activations + predicted.autocast_weights + predicted.inputs
    assert held == bytes_saved_by_autograd(shape, precision)


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of tensors that are alive, and the most there ever were."""

    def __init__(self, *existing: Tensor) -> None:
        super().__init__()
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

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self.count(leaf)
        return result


def measured_peak(shape: ModelShape, precision: str, mode: str) -> int:
    """Most bytes alive during the second step, when the optimizer's state exists already."""
    model, batch = build(shape, device="cpu"), batch_for(shape)
    optimizer = AdamW(model.parameters())

    def step() -> None:
        if mode == "forward":
            with torch.no_grad():
                forward(model, batch[0], precision)
            return
        forward_and_loss(model, batch, precision).backward()
        if mode == "train_step":
            optimizer.step()

    step()
    optimizer.zero_grad(set_to_none=True)
    state = [t for s in optimizer.state.values() for t in s.values() if isinstance(t, Tensor)]
    inputs = batch if mode != "forward" else batch[:1]
    with LiveBytes(*model.parameters(), *model.buffers(), *state, *inputs) as live:
        step()
    return live.peak


@pytest.mark.parametrize("mode", ["forward", "forward_backward", "train_step"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_the_peak_is_the_one_measured(shape: ModelShape, precision: Any, mode: Any) -> None:
    predicted = memory(shape, precision, mode, device="cpu").peak

    assert predicted == pytest.approx(measured_peak(shape, precision, mode), rel=0.02)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
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


def test_state_between_steps_of_the_small_model_by_hand() -> None:
    parts = memory(SMALL, "fp32", "train_step")

    assert parts.parameters == parts.gradients == 4 * 128_625_408
    assert parts.optimizer_state == 8 * 128_625_408
    assert parts.buffers == 2 * 4 * 128 * 64
    assert parts.inputs == 2 * 8 * 512
    assert parts.autocast_weights == 0


def test_inference_keeps_nothing_for_backward() -> None:
    parts = memory(SMALL, "bf16", "forward")

    assert (parts.gradients, parts.optimizer_state, parts.activations) == (0, 0, 0)
    assert parts.autocast_weights == 2 * (128_625_408 - 7_680_000 - 19_200)
    assert parts.peak < memory(SMALL, "bf16", "forward_backward").peak


def test_on_a_gpu_autocast_keeps_softmax_in_fp32_and_a_copy_besides() -> None:
    gpu = saved_activations(SMALL, "bf16", device="cuda")
    cpu = saved_activations(SMALL, "bf16", device="cpu")

    assert gpu - cpu == 4 * SMALL.num_layers * SMALL.scores


@pytest.mark.parametrize(("one", "other"), [("fp32", "tf32"), ("bf16", "fp16")])
def test_precisions_of_equal_width_occupy_the_same(one: Any, other: Any) -> None:
    assert memory(SMALL, one, "train_step") == memory(SMALL, other, "train_step")


@pytest.mark.parametrize(
    ("precision", "mode", "device", "message"),
    [
        ("fp8", "forward", "cuda", "precision: 'fp8' is not known; allowed are fp32, tf32"),
        ("fp32", "train", "cuda", "mode: 'train' is not known"),
        ("fp32", "forward", "tpu", "device: 'tpu' is not known; allowed are cuda, cpu"),
    ],
    ids=["precision", "mode", "device"],
)
def test_unknown_names_are_refused_in_one_line(
    precision: Any, mode: Any, device: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        memory(SMALL, precision, mode, device=device)
