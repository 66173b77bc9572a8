"""Errors of one line that name the argument, its value and what is allowed."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import LBFGS

from lmlab.parallel import FSDP, BucketedDDP, NaiveDDP, ShardedOptimizer
from tests.parallel.launcher import on_ranks
from tests.parallel.models import build
from tests.parallel.training import batch_of


def wrong_arguments() -> list[tuple[str, Callable[[], Any]]]:
    module, vector = build("layers"), torch.ones(2)
    return [
        ("bucket_size_mb", lambda: BucketedDDP(module, 0)),
        ("bucket_size_mb", lambda: BucketedDDP(module, float("nan"))),
        ("compute_dtype", lambda: FSDP(module, torch.int8)),
        ("blocks", lambda: FSDP(build("layers"), blocks=lambda model: [nn.Tanh()])),
        ("head.weight", lambda: FSDP(module).load_state_dict({"head.weight": vector})),
        ("optimizer_cls", lambda: ShardedOptimizer(module.parameters(), LBFGS)),
    ]


@on_ranks(2)
def test_wrong_arguments_give_errors_of_one_line() -> None:
    for name, call in wrong_arguments():
        with pytest.raises(ValueError, match=rf"^{name} must [^\n]*, got [^\n]+$"):
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
