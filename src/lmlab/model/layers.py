"""The layers of the model: linear, embedding, RMSNorm, SwiGLU and rotary embedding, without biases.

Weights are initialized on their device. A GPU fills 2.7 billion numbers in a second; initializing
on the host and copying takes minutes, for every point of the study.

The layers are written for autocast. Matmuls use `F.linear`, which autocast runs in 16 bit with a
cached 16-bit copy of each weight. A mean of squares loses digits in bf16 and overflows in fp16, and
autocast's list of fp32 operations differs between CPU and GPU, so RMSNorm casts to fp32 itself.
"""

import math
from typing import TypedDict, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CUTOFF_IN_STDS = 3.0  # initial weights are truncated at this many standard deviations


class Factory(TypedDict, total=False):
    """Device and dtype in which a layer creates its tensors."""

    device: torch.device | str | None
    dtype: torch.dtype | None


def truncated_normal_(weight: Tensor, std: float) -> None:
    """Fill a weight in place from a truncated normal distribution."""
    cutoff = CUTOFF_IN_STDS * std
    nn.init.trunc_normal_(weight, std=std, a=-cutoff, b=cutoff)


def at_least_fp32(dtype: torch.dtype) -> torch.dtype:
    """The dtype for statistics of `dtype` tensors: fp32, or fp64 for fp64."""
    return torch.promote_types(dtype, torch.float32)


class Linear(nn.Module):
    """x W^T; an initial std of sqrt(2 / (in + out)) preserves variance in both directions."""

    def __init__(self, in_features: int, out_features: int, **factory: Unpack[Factory]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features, **factory))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        truncated_normal_(self.weight, math.sqrt(2.0 / sum(self.weight.shape)))

    def forward(self, x: Tensor) -> Tensor:
        """(..., in_features) to (..., out_features)."""
        return F.linear(x, self.weight)


class Embedding(nn.Module):
    """One vector per token, with an initial std of 1."""

    def __init__(self, num_embeddings: int, embedding_dim: int, **factory: Unpack[Factory]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_embeddings, embedding_dim, **factory))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        truncated_normal_(self.weight, 1.0)

    def forward(self, tokens: Tensor) -> Tensor:
        """Token ids (...) to vectors (..., embedding_dim)."""
        return F.embedding(tokens, self.weight)


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, computed in fp32."""

    def __init__(self, d_model: int, eps: float = 1e-5, **factory: Unpack[Factory]) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(d_model, **factory))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Normalize; the result has the dtype of x."""
        wide = x.to(at_least_fp32(x.dtype))
        inverse_rms = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + self.eps)
        return (wide * inverse_rms * self.weight).to(x.dtype)


class SwiGLU(nn.Module):
    """w2(silu(w1 x) * w3 x): a gated feed-forward network."""

    def __init__(self, d_model: int, d_ff: int, **factory: Unpack[Factory]) -> None:
        super().__init__()
        self.w1 = Linear(d_model, d_ff, **factory)
        self.w2 = Linear(d_ff, d_model, **factory)
        self.w3 = Linear(d_model, d_ff, **factory)

    def forward(self, x: Tensor) -> Tensor:
        """(..., d_model) to (..., d_model) through d_ff."""
        hidden: Tensor = F.silu(self.w1(x)) * self.w3(x)
        output: Tensor = self.w2(hidden)
        return output


class RotaryEmbedding(nn.Module):
    """Rotary position embedding: positions as rotations, so that a dot product depends on distance.

    Adjacent features form pairs (x0, x1), (x2, x3), ...; pair i of a head of size d is rotated by
    the angle position * theta^(-2i/d). (The pairing is part of a checkpoint format.) A pair becomes
    (x0 cos - x1 sin, x1 cos + x0 sin). With each cosine stored twice and each sine as (-sin, sin),
    that is `x * cos + swap(x) * sin` over the whole head: three memory-bound kernels instead of
    seven on strided halves, and no saved activations, because the tables need no gradient.

    The tables are computed in double precision (an angle of 1000 rad in fp32 is already off by
    6e-5), stored in fp32, and cast to the dtype of the activations when used. They follow from the
    hyperparameters, so they are not part of a checkpoint.
    """

    cos: Tensor
    sin: Tensor

    def __init__(
        self, head_dim: int, context_length: int, theta: float, **factory: Unpack[Factory]
    ) -> None:
        super().__init__()
        self.theta = theta
        for name in ("cos", "sin"):
            table = torch.empty(context_length, head_dim, **factory)
            self.register_buffer(name, table, persistent=False)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Fill the tables; needed again after `to_empty`, which leaves buffers undefined."""
        context_length, head_dim = self.cos.shape
        device = self.cos.device
        positions = torch.arange(context_length, device=device, dtype=torch.float64)
        exponents = torch.arange(0, head_dim, 2, device=device, dtype=torch.float64) / head_dim
        angles = torch.outer(positions, self.theta**-exponents)
        cos, sin = angles.cos(), angles.sin()
        self.cos.copy_(torch.stack((cos, cos), dim=-1).flatten(-2))
        self.sin.copy_(torch.stack((-sin, sin), dim=-1).flatten(-2))

    def tables(self, length: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosines and signed sines of positions 0 .. length-1, for `rotate`."""
        return self.cos[:length].to(dtype), self.sin[:length].to(dtype)

    def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Rotate queries and keys (..., sequence, head_dim) that start at position 0."""
        cos, sin = self.tables(q.shape[-2], q.dtype)
        return rotate(q, cos, sin), rotate(k, cos, sin)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each adjacent pair of x (..., sequence, head_dim) by the angle of its position."""
    swapped = x.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    return torch.addcmul(x * cos, swapped, sin)
