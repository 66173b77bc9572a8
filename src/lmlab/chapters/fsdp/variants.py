"""The arms of the FSDP comparison: how each is put together, and its first two steps alone.

PyTorch's `fully_shard` is cut at the members of the model's lists of blocks and at its root, the
way its documentation cuts a Transformer. Whether it runs on a backend and device is for it to say:
what it raises becomes the arm's reason, and the other arms go on. All ranks must agree on that, or
one would wait for another that has given up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from lmlab.jobs.memory_stages import Training, first_step
from lmlab.jobs.rank_work import RankWork, release
from lmlab.measure import across_ranks
from lmlab.measure.device import is_out_of_memory
from lmlab.parallel.ddp_overlapped import BucketedDDP
from lmlab.parallel.fsdp import FSDP
from lmlab.parallel.sharded_optimizer import ShardedOptimizer

DDP, SHARDED, OURS, TORCH = "ddp", "ddp_sharded_optimizer", "fsdp", "torch_fully_shard"
ARMS = (DDP, SHARDED, OURS, TORCH)


@dataclass(frozen=True, kw_only=True)
class Builder:
    """Makes an arm by its name."""

    bucket_mb: float

    def __call__(self, name: str, work: RankWork) -> Training:
        makers: dict[str, Callable[[RankWork], Training]] = {
            DDP: self._data_parallel,
            SHARDED: self._with_sharded_optimizer,
            OURS: _ours,
            TORCH: _torch,
        }
        return makers[name](work)

    def _data_parallel(self, work: RankWork) -> Training:
        model = BucketedDDP(work.model(), self.bucket_mb)
        optimizer = work.adamw(model.parameters())
        return _replicated(model, optimizer)

    def _with_sharded_optimizer(self, work: RankWork) -> Training:
        model = BucketedDDP(work.model(), self.bucket_mb)
        return _replicated(model, ShardedOptimizer(model.parameters(), torch.optim.AdamW))


def _replicated(model: BucketedDDP, optimizer: torch.optim.Optimizer) -> Training:
    return Training(
        model=model,
        optimizer=optimizer,
        finish=model.finish_gradient_synchronization,
        state=lambda: optimizer.state,
        buffers=lambda: [bucket.buffer for bucket in model.buckets],
    )


def _ours(work: RankWork) -> Training:
    model = FSDP(work.model())
    optimizer = work.adamw(model.parameters())
    return Training(
        model=model,
        optimizer=optimizer,
        finish=model.finish_gradient_synchronization,
        state=lambda: optimizer.state,
    )


def _torch(work: RankWork) -> Training:
    model = work.model()
    group = dist.group.WORLD
    assert group is not None, "a rank measures within a process group"
    mesh = DeviceMesh.from_group(group, work.device.type)
    for block in blocks_of(model):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = work.adamw(model.parameters())
    return Training(
        model=model, optimizer=optimizer, finish=lambda: None, state=lambda: optimizer.state
    )


def blocks_of(model: nn.Module) -> Iterator[nn.Module]:
    """The repeated parts of a model: members of its lists of modules."""
    for module in model.modules():
        if isinstance(module, nn.ModuleList):
            yield from module


def alone(name: str, build: Builder, work: RankWork) -> dict[str, Any]:
    """Two steps of an arm by itself: memory of the first, losses of both, or why not."""
    release(work.device)
    try:
        own, reason = two_steps(build(name, work), work), None
    except (RuntimeError, NotImplementedError, ValueError, AssertionError) as error:
        if name != TORCH or is_out_of_memory(error):
            raise  # ours runs everywhere: that it does not is a failure of the whole point
        own, reason = {}, f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    reasons = [each for each in across_ranks.gather(reason) if each]
    release(work.device)
    if reasons:
        return {"status": "unsupported", "reason": reasons[0]}
    return {"status": "ok", "reason": None, "ranks": across_ranks.gather(own)}


def two_steps(training: Training, work: RankWork) -> dict[str, Any]:
    """Memory at the moments of the first, losses of both."""
    first = first_step(training, work)
    loss = first.pop("loss")
    return {**first, "losses": [loss, training.step(work)]}
