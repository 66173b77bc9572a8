"""Naive attention with the softmax written out: max, subtract, exp, sum, divide.

PyTorch's softmax is one kernel that reads every score once and writes every weight once. Written
out, it takes five kernels, which read S x S tensors five times and write them three times for the
same few operations per score: what a formula costs without a dedicated kernel.
"""

import math

import torch
from torch import Tensor

from lmlab.attention.naive import future_mask


def attention(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool) -> Tensor:
    """Attention of q (..., queries, d) over k and v (..., keys, d), same leading dimensions."""
    scores = torch.matmul(q, k.transpose(-2, -1)) * (1.0 / math.sqrt(q.shape[-1]))
    if is_causal:
        scores = scores.masked_fill(future_mask(q, k), float("-inf"))
    # In fp32, as under autocast: rounding to 16 bits after every operation would put gradients
    # of long sequences off by more than 3 %.
    weights = softmax(scores.float()).to(scores.dtype)
    return torch.matmul(weights, v)


def softmax(scores: Tensor) -> Tensor:
    """Softmax over the last dimension, one operation at a time."""
    shifted = scores - scores.amax(-1, keepdim=True)
    exponentials = torch.exp(shifted)
    return exponentials / exponentials.sum(-1, keepdim=True)
