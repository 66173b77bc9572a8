"""Cross-entropy of next-token prediction, computed in fp32 with one logit-sized buffer at a time.

    loss = mean over tokens of  log(sum_j exp(logit_j - max)) - (logit_target - max)

The logits are the widest tensor of the model (tokens x vocabulary), and loss code easily makes five
copies of it: an fp32 cast, the log-probabilities, their exponentials, a gradient for each. What is
needed for the gradient, softmax(logits) - onehot(target), is the logits themselves, which exist
already, and two numbers a token. So the derivative is written by hand here: saved are the logits
in the type they came in, each row's maximum and its sum of exponentials; the backward pass makes
one buffer and works in place.

Subtracting the maximum first keeps exponentials from overflowing. It is never added back: of a
log-sum-exp near 10,000 fp32 would keep three digits after the point, of log(sum) all of them.
Under autocast the arithmetic is fp32 too: a bf16 logit of 20 has steps of 1/8.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lmlab.model.layers import at_least_fp32


class _CrossEntropy(torch.autograd.Function):
    """Mean negative log-likelihood with a backward pass that works in one buffer."""

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
    """Mean loss of logits (..., vocabulary) against target ids (...), over all leading dims."""
    if logits.shape[:-1] != targets.shape:
        raise ValueError(
            f"targets of shape {tuple(targets.shape)} do not match logits of shape"
            f" {tuple(logits.shape)}; allowed is {tuple(logits.shape[:-1])}"
        )
    loss: Tensor = _CrossEntropy.apply(logits, targets)
    return loss
