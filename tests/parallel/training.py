"""Training on ranks next to training in one process, how close both must be, and what is sent."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from lmlab.parallel import FSDP, BucketedDDP, FlatDDP, NaiveDDP, OverlappedDDP
from tests.parallel.models import LENGTH, VOCABULARY, build

STEPS = 4

Wrap = Callable[[nn.Module], Any]
SCHEMES: dict[str, Wrap] = {
    "naive": NaiveDDP,
    "flat": FlatDDP,
    "overlapped": OverlappedDDP,
    "bucketed": lambda module: BucketedDDP(module, bucket_size_mb=0.0005),
    "fsdp": FSDP,
    "fsdp_one_group": lambda module: FSDP(module, blocks=lambda model: [model]),
}
DDP = [name for name in SCHEMES if not name.startswith("fsdp")]

every_scheme = pytest.mark.parametrize("scheme", SCHEMES)
every_ddp = pytest.mark.parametrize("scheme", DDP)

# Weight decay moves every parameter that has a gradient, even a zero one.
SGD_SETTINGS = {"lr": 0.05, "weight_decay": 0.01}


def sgd(parameters: Any) -> Optimizer:
    return SGD(parameters, **SGD_SETTINGS)


def batch_of(step: int, samples_per_rank: int = 2) -> Tensor:
    size = (samples_per_rank * dist.get_world_size(), LENGTH)
    return torch.randint(VOCABULARY, size, generator=torch.Generator().manual_seed(step))


def own_part(batch: Tensor) -> Tensor:
    return batch.chunk(dist.get_world_size())[dist.get_rank()]


def loss_of(output: Tensor) -> Tensor:
    """A mean over samples that is not linear in the output."""
    return (output.double() + 1.0).square().mean().to(output.dtype)


def backward(model: nn.Module, batch: Tensor) -> None:
    """Gradients of the mean loss over a batch, averaged over ranks if the model does that."""
    loss_of(model(batch)).backward()
    if hasattr(model, "finish_gradient_synchronization"):
        model.finish_gradient_synchronization()


def clear_gradients(*models: nn.Module) -> None:
    for model in models:
        model.zero_grad(set_to_none=True)


def wrapped_and_alone(scheme: str, model: str) -> tuple[Any, nn.Module]:
    """A wrapped model, with other weights on other ranks, and what rank 0's weights make alone."""
    return SCHEMES[scheme](build(model, seed=100 * dist.get_rank())), build(model)


def train_both(
    wrapped: Any,
    alone: nn.Module,
    batches: Iterable[Tensor],
    tolerance: float = 1e-6,
    optimizer: Optimizer | None = None,
) -> None:
    """Train on ranks and in one process; gradients and final parameters must agree."""
    optimizers = [optimizer or sgd(wrapped.parameters()), sgd(alone.parameters())]
    for batch in batches:
        clear_gradients(wrapped, alone)
        backward(wrapped, own_part(batch))
        backward(alone, batch)
        assert_gradients_near(wrapped, alone, tolerance)
        for optimizer in optimizers:
            optimizer.step()
    assert_near(full_parameters(wrapped), parameters(alone), tolerance)


def gradients(module: nn.Module) -> dict[str, Tensor | None]:
    return {n: None if p.grad is None else p.grad.clone() for n, p in module.named_parameters()}


def parameters(module: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in module.named_parameters()}


def full_parameters(wrapped: Any) -> dict[str, Tensor]:
    if isinstance(wrapped, FSDP):
        return wrapped.gather_full_parameters()
    return parameters(wrapped.module)


def assert_gradients_near(wrapped: Any, alone: nn.Module, tolerance: float = 1e-6) -> None:
    """Gradients of a wrapped model are those of one process; FSDP's are this rank's rows."""
    expected = gradients(alone)
    if isinstance(wrapped, FSDP):
        assert not any(group.gathered or group.running for group in wrapped.groups)
        for param in wrapped.sharded_params:
            full = expected[param.name]
            expected[param.name] = None if full is None else param.shard_of(full)
    assert_near(gradients(wrapped.module), expected, tolerance)


def assert_near(
    ours: Mapping[str, Tensor | None], expected: Mapping[str, Tensor | None], tolerance: float
) -> None:
    """All together within the tolerance, each tensor within ten times that.

    A small tensor may be the difference of large ones and inherits their rounding errors.
    """
    missing = {name for name, tensor in expected.items() if tensor is None}
    assert {name for name, tensor in ours.items() if tensor is None} == missing
    pairs = {name: (ours[name], expected[name]) for name in expected.keys() - missing}
    far = {n: d for n, (a, b) in pairs.items() if (d := distance(a, b)) > 10 * tolerance}
    assert not far, f"relative differences above {10 * tolerance:g}: {far}"
    sides = zip(*pairs.values(), strict=True)
    total = distance(*(torch.cat([t.double().flatten() for t in side]) for side in sides))
    assert total <= tolerance


def distance(ours: Tensor | None, expected: Tensor | None) -> float:
    assert ours is not None
    assert expected is not None
    assert ours.shape == expected.shape
    if expected.numel() == 0:
        return 0.0
    return float((ours - expected).abs().max() / expected.abs().max().clamp(min=1e-12))


KINDS = {
    "all_reduce": "all-reduce",
    "broadcast": "broadcast",
    "all_gather_single": "all-gather",
    "all_gather_into_tensor": "all-gather",
    "reduce_scatter_single": "reduce-scatter",
    "reduce_scatter_tensor": "reduce-scatter",
}


@dataclass(frozen=True)
class Message:
    """One collective, with the size of the larger of its tensors."""

    kind: str
    numel: int
    dtype: torch.dtype
    is_async: bool


@contextmanager
def recorded_messages() -> Iterator[list[Any]]:
    """A list that receives a Message per collective; tests may append entries of their own."""
    log: list[Any] = []
    with mock.patch.multiple(
        dist, **{name: _recording(name, log) for name in KINDS if hasattr(dist, name)}
    ):
        yield log


def _recording(name: str, log: list[Any]) -> Any:
    original = getattr(dist, name)

    def collective(*tensors: Tensor, **options: Any) -> Any:
        largest = max(tensors, key=lambda tensor: tensor.numel())
        is_async = bool(options.get("async_op"))
        log.append(Message(KINDS[name], largest.numel(), largest.dtype, is_async))
        return original(*tensors, **options)

    return collective
