"""Cross-entropy of next-token prediction, computed in fp32 with one logit-sized buffer at a time.

The logits are the largest tensor of the model (tokens x vocabulary), and a straightforward loss
makes five copies of them: fp32 cast, log-probabilities, exponentials, gradients. But the gradient,
softmax(logits) - onehot(target), needs only the logits, which exist already, and two numbers per
token. So backward is written by hand: forward saves the logits in their own dtype and each row's
maximum and sum of exponentials, and both passes work in place in one buffer.

Subtracting the maximum prevents overflow. It is never added back, because near 10,000 fp32 has only
three decimals left. Under autocast the arithmetic is fp32 too: near 20, bf16 steps are 1/8.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lmlab.model.layers import at_least_fp32


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor) -> Tensor:
        maximum = logits.amax(dim=-1, keepdim=True).to(at_least_fp32(logits.dtype))
        # 16-bit logits minus fp32 maximum is fp32: the cast happens inside this one kernel.
        exp_sum = (logits - maximum).exp_().sum(dim=-1, keepdim=True)
        target_logits = logits.gather(-1, targets.unsqueeze(-1)) - maximum
        ctx.save_for_backward(logits, targets, maximum, exp_sum)
        return (exp_sum.log() - target_logits).mean()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, loss_gradient: Tensor) -> tuple[Tensor, None]:
        logits, targets, maximum, exp_sum = ctx.saved_tensors
        per_token = loss_gradient / targets.numel()
        gradient = (logits - maximum).exp_().mul_(per_token / exp_sum)
        gradient.scatter_add_(-1, targets.unsqueeze(-1), -per_token.expand_as(exp_sum))
        return gradient.to(logits.dtype), None


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean loss of logits (..., vocabulary) for target ids (...)."""
    if logits.shape[:-1] != targets.shape:
        raise ValueError(
            f"targets must have shape {tuple(logits.shape[:-1])} for logits of shape"
            f" {tuple(logits.shape)}, got {tuple(targets.shape)}"
        )
    loss: Tensor = _CrossEntropy.apply(logits, targets)
    return loss
