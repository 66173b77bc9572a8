"""A training step on part of a batch and on all of it, and how near the two must stay."""

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Optimizer

from lmlab.parallel import FSDP, BucketedDDP, FlatDDP, NaiveDDP, OverlappedDDP
from tests.parallel.models import global_batch, loss_of

SAMPLES_PER_RANK = 2
STEPS = 10

WRAPPERS: dict[str, Callable[[nn.Module], Any]] = {
    "naive": NaiveDDP,
    "flat": FlatDDP,
    "overlapped": OverlappedDDP,
    "bucketed": lambda module: BucketedDDP(module, bucket_size_mb=0.0005),
}


def torch_ddp(module: nn.Module) -> DistributedDataParallel:
    """Torch's own, set to do what ours do unasked."""
    return DistributedDataParallel(module, find_unused_parameters=True)


def sgd(parameters: Any) -> Optimizer:
    """Plain SGD; its weight decay moves any parameter that has a gradient, zeros included."""
    return SGD(parameters, lr=0.05, weight_decay=0.01)


def own_part(batch: Tensor) -> Tensor:
    """This rank's samples."""
    return batch.chunk(dist.get_world_size())[dist.get_rank()]


def batch_of(seed: int, step: int, samples_per_rank: int = SAMPLES_PER_RANK) -> Tensor:
    """The samples of all ranks."""
    return global_batch(seed, step, samples_per_rank * dist.get_world_size())


def backward(model: nn.Module, batch: Tensor) -> None:
    """Gradients of the mean loss over a batch, averaged over ranks if the model does that."""
    loss_of(model(batch)).backward()
    if hasattr(model, "finish_gradient_synchronization"):
        model.finish_gradient_synchronization()


def gradients(module: nn.Module) -> dict[str, Tensor | None]:
    """Gradient of each parameter, by name."""
    return {
        name: None if parameter.grad is None else parameter.grad.clone()
        for name, parameter in module.named_parameters()
    }


def parameters(module: nn.Module) -> dict[str, Tensor]:
    """Value of each parameter, by name."""
    return {name: parameter.detach().clone() for name, parameter in module.named_parameters()}


def own_rows(model: FSDP, whole: Mapping[str, Tensor | None]) -> dict[str, Tensor | None]:
    """Of whole tensors, what this rank keeps."""
    rows = dict(whole)
    for unit in model.units:
        tensor = whole[unit.name]
        rows[unit.name] = None if tensor is None else unit.rows_of(tensor)
    return rows


def assert_near(
    ours: Mapping[str, Tensor | None], expected: Mapping[str, Tensor | None], tolerance: float
) -> None:
    """Equal up to rounding: all together within the tolerance, each alone within ten times that.

    A single small tensor may be the difference of large ones, whose rounding it inherits.
    """
    missing = {name for name, tensor in expected.items() if tensor is None}
    assert {name for name, tensor in ours.items() if tensor is None} == missing
    pairs = {name: (ours[name], expected[name]) for name in expected.keys() - missing}
    far = {n: d for n, (a, b) in pairs.items() if (d := distance(a, b)) > 10 * tolerance}
    assert not far, f"relative differences above {10 * tolerance:g}: {far}"
    sides = zip(*pairs.values(), strict=True)
    together = distance(*(torch.cat([t.double().flatten() for t in side]) for side in sides))
    assert together <= tolerance, f"all together {together:g} apart, allowed is {tolerance:g}"


def distance(ours: Tensor | None, expected: Tensor | None) -> float:
    """Largest difference, in units of the largest number expected."""
    assert ours is not None
    assert expected is not None
    assert ours.shape == expected.shape
    if expected.numel() == 0:
        return 0.0
    size = expected.abs().max().clamp(min=1e-12)
    return float((ours - expected).abs().max() / size)


def quietly(function: Callable[..., Any], *positional: Any, **keywords: Any) -> Any:
    """Call torch's own, whose warnings are not about this project."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return function(*positional, **keywords)
