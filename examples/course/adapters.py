"""The adapters of CS336 assignment 2, both editions, implemented with this package.

The course's public test suites reach an implementation through one file, `tests/adapters.py`. Copy
this one over it (`cp examples/course/adapters.py <assignment>/tests/`), install this package next
to the course's (`pip install -e .`), and run `pytest tests` there.

Names and signatures are the course's. Both editions are covered: 2025 tests two data-parallel
wrappers (`get_ddp_individual_parameters`, `get_ddp_bucketed`), 2026 one (`get_ddp`) and FSDP.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lmlab.attention import FlashAttention, FlashAttentionTiled
from lmlab.parallel import FSDP, BucketedDDP, OverlappedDDP, ShardedOptimizer


def get_flashattention_autograd_function_pytorch() -> type[torch.autograd.Function]:
    """FlashAttention-2 in PyTorch operations."""
    return FlashAttentionTiled


def get_flashattention_autograd_function_triton() -> type[torch.autograd.Function]:
    """FlashAttention-2 in Triton kernels."""
    return FlashAttention


def get_ddp(module: nn.Module) -> nn.Module:
    """Data parallelism that averages each gradient as soon as it is there."""
    return OverlappedDDP(module)


def ddp_on_after_backward(ddp_model: Any, optimizer: Optimizer) -> None:
    """Wait for the gradients that are still under way."""
    ddp_model.finish_gradient_synchronization()


get_ddp_individual_parameters = get_ddp
ddp_individual_parameters_on_after_backward = ddp_on_after_backward


def get_ddp_bucketed(module: nn.Module, bucket_size_mb: float) -> nn.Module:
    """The same in buckets of about that many megabytes."""
    return BucketedDDP(module, bucket_size_mb)


ddp_bucketed_on_after_backward = ddp_on_after_backward


def ddp_bucketed_on_train_batch_start(ddp_model: Any, optimizer: Optimizer) -> None:
    """Nothing to prepare: a bucket is ready again once its gradients have been averaged."""


def get_fsdp(module: nn.Module, compute_dtype: torch.dtype | None = None) -> nn.Module:
    """Fully sharded data parallelism; the shards stay in fp32."""
    return FSDP(module, compute_dtype=compute_dtype)


fsdp_on_after_backward = ddp_on_after_backward


def fsdp_gather_full_params(fsdp_model: Any) -> dict[str, Tensor]:
    """Full parameters by their name in the wrapped module."""
    full: dict[str, Tensor] = fsdp_model.gather_full_parameters()
    return full


def get_sharded_optimizer(params: Any, optimizer_cls: type[Optimizer], **kwargs: Any) -> Optimizer:
    """An optimizer whose state is divided among the ranks."""
    return ShardedOptimizer(params, optimizer_cls, **kwargs)
