"""Errors of one line that name the argument, its value and what is allowed."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import LBFGS, SGD

from lmlab.parallel import FSDP, BucketedDDP, FlatDDP, NaiveDDP, OverlappedDDP, ShardedOptimizer
from tests.parallel.launcher import on_ranks
from tests.parallel.models import build
from tests.parallel.training import batch_of

Wrong = tuple[str, type[Exception], Callable[[], Any]]


def wrong_arguments() -> list[Wrong]:
    module, nested = build("layers"), nn.Sequential(nn.Sequential(nn.Linear(2, 2)))
    parameters, vector = list(module.parameters()), torch.ones(2)
    optimizer = ShardedOptimizer(parameters, SGD, lr=0.1)
    wrapped, outsiders = FSDP(build("layers")), dist.GroupMember.NON_GROUP_MEMBER
    return [
        ("module", TypeError, lambda: NaiveDDP([module])),
        ("module", TypeError, lambda: FSDP("layers")),
        ("process_group", TypeError, lambda: FlatDDP(module, "gloo")),
        ("process_group", TypeError, lambda: OverlappedDDP(module, 0)),
        ("process_group", ValueError, lambda: FlatDDP(module, outsiders)),
        ("bucket_size_mb", TypeError, lambda: BucketedDDP(module, "25")),
        ("bucket_size_mb", TypeError, lambda: BucketedDDP(module, True)),
        ("bucket_size_mb", ValueError, lambda: BucketedDDP(module, 0)),
        ("bucket_size_mb", ValueError, lambda: BucketedDDP(module, float("nan"))),
        ("assign", ValueError, lambda: NaiveDDP(module).load_state_dict({}, assign=True)),
        ("compute_dtype", TypeError, lambda: FSDP(module, "bf16")),
        ("compute_dtype", TypeError, lambda: FSDP(module, nested)),
        ("compute_dtype", ValueError, lambda: FSDP(module, torch.int8)),
        ("shards", TypeError, lambda: FSDP(module, shards=nn.Linear(2, 2).weight)),
        ("shards", ValueError, lambda: FSDP(module, shards=lambda m: isinstance(m, nn.LayerNorm))),
        ("blocks", TypeError, lambda: FSDP(module, blocks=[module.inner])),
        ("blocks", ValueError, lambda: FSDP(build("layers"), blocks=lambda model: [nn.Tanh()])),
        ("state_dict", TypeError, lambda: wrapped.load_state_dict([1])),
        ("head.weight", ValueError, lambda: wrapped.load_state_dict({"head.weight": vector})),
        ("assign", ValueError, lambda: wrapped.load_state_dict({}, assign=True)),
        ("params", TypeError, lambda: ShardedOptimizer(3, SGD)),
        ("optimizer_cls", TypeError, lambda: ShardedOptimizer(parameters, optimizer)),
        ("optimizer_cls", ValueError, lambda: ShardedOptimizer(parameters, nn.Linear)),
        ("optimizer_cls", ValueError, lambda: ShardedOptimizer(parameters, LBFGS)),
        ("process_group", TypeError, lambda: ShardedOptimizer(parameters, SGD, process_group=1)),
        ("param_group", TypeError, lambda: optimizer.add_param_group(parameters)),
        ("closure", TypeError, lambda: optimizer.step(0.1)),
        ("state_dict", TypeError, lambda: optimizer.load_state_dict(None)),
    ]  # fmt: skip


@on_ranks(2)
def test_wrong_arguments_give_errors_of_one_line() -> None:
    for name, error, call in wrong_arguments():
        with pytest.raises(error, match=rf"^{name} must [^\n]*, got [^\n]+$"):
            call()


@pytest.mark.parametrize("wrap", [NaiveDDP, FSDP])
@on_ranks(2)
def test_wrong_use_gives_errors_of_one_line(wrap: Callable[[nn.Module], Any]) -> None:
    sparse = wrap(nn.Embedding(4, 2, sparse=True))
    with pytest.raises(ValueError, match=r"^gradient must be dense, got .*\(4, 2\)"):
        sparse(torch.tensor([1])).sum().backward()
    unfrozen = wrap(build("frozen"))
    unfrozen.module.requires_grad_(True)
    with pytest.raises(ValueError, match=r"^requires_grad must be set before wrapping"):
        unfrozen.finish_gradient_synchronization()


@on_ranks(2)
def test_a_sharded_module_must_not_be_moved() -> None:
    with pytest.raises(ValueError, match=r"^embedding.weight must not be moved or replaced"):
        FSDP(build("layers")).to("meta")(batch_of(0))
