"""The variants of the FSDP comparison: how each is built, and its first two steps alone.

PyTorch's `fully_shard` wraps the members of the model's module lists and its root, as its
documentation does for a Transformer. If it does not run on a backend or device, its error becomes
the variant's reason and the other variants go on. All ranks must agree on that; otherwise one
would wait for another that has stopped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
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

Build = Callable[[str, RankWork], Training]


def builder(bucket_mb: float) -> Build:
    """Builds a variant by name; data parallelism uses buckets of this size."""
    makers: dict[str, Callable[[RankWork], Training]] = {
        DDP: lambda work: _data_parallel(work, bucket_mb, work.adamw),
        SHARDED: lambda work: _data_parallel(
            work, bucket_mb, lambda parameters: ShardedOptimizer(parameters, torch.optim.AdamW)
        ),
        OURS: lambda work: _ours(work),
        TORCH: lambda work: _torch(work),
    }
    return lambda name, work: makers[name](work)


def _data_parallel(
    work: RankWork,
    bucket_mb: float,
    optimizer_of: Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer],
) -> Training:
    model = BucketedDDP(work.model(), bucket_mb)
    optimizer = optimizer_of(model.parameters())
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
    """The repeated parts of a model: the members of its module lists."""
    for module in model.modules():
        if isinstance(module, nn.ModuleList):
            yield from module


def two_steps_alone(name: str, build: Build, work: RankWork) -> list[dict[str, Any]] | str:
    """Two steps of a variant alone on every rank: memory of the first and losses of both, or the
    reason why it does not run here."""
    release(work.device)
    own: dict[str, Any] = {}
    reason = None
    try:
        own = _two_steps(build(name, work), work)
    except (RuntimeError, NotImplementedError, ValueError, AssertionError) as error:
        if name != TORCH or is_out_of_memory(error):
            raise  # ours must run everywhere: an error fails the whole point
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    reasons = [each for each in across_ranks.gather(reason) if each]
    release(work.device)
    return reasons[0] if reasons else across_ranks.gather(own)


def _two_steps(training: Training, work: RankWork) -> dict[str, Any]:
    first = first_step(training, work)
    return {**first, "losses": [first["loss"], float(training.step(work))]}
