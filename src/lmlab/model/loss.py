"""Cross-entropy of next-token prediction, computed in fp32 with one logit-sized buffer at a time.

    loss = mean over tokens of  log(sum_j exp(logit_j)) - logit_target

The logits are the widest tensor of the model (tokens x vocabulary), and loss code easily makes five
copies of it: an fp32 cast, the log-probabilities, their exponentials, a gradient for each. What is
needed for the gradient, softmax(logits) - onehot(target), is the logits themselves, which exist
already, and one number a token. So the derivative is written by hand here: saved are the logits in
the type they came in and the log-sum-exp; the backward pass makes one buffer and works in place.

The sum of exponentials is taken after subtracting the row's maximum, so no logit is too large.
Under autocast the arithmetic is still fp32: a bf16 logit of 20 has steps of 1/8.
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
        wide = at_least_fp32(logits.dtype)
        maximum = logits.amax(dim=-1, keepdim=True).to(wide)
        # 16-bit logits minus fp32 maximum is fp32: the cast happens inside this one kernel.
        log_sum_exp = (logits - maximum).exp_().sum(dim=-1).log_().add_(maximum.squeeze(-1))
        target_logits = logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
        ctx.save_for_backward(logits, targets, log_sum_exp)
        return (log_sum_exp - target_logits).mean()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, loss_gradient: Tensor) -> tuple[Tensor, None]:
        logits, targets, log_sum_exp = ctx.saved_tensors
        gradient = (logits - log_sum_exp.unsqueeze(-1)).exp_()
        minus_one = gradient.new_full((), -1.0).expand_as(targets).unsqueeze(-1)
        gradient.scatter_add_(-1, targets.unsqueeze(-1), minus_one)
        gradient.mul_(loss_gradient / targets.numel())
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
