"""The layers of the model: linear, embedding, RMSNorm and SwiGLU, without biases.

Weights are initialized on their device. A GPU fills 2.7 billion numbers in a second; doing it on
the host and copying takes minutes, for every point of the study.

The layers are written for autocast. Matmuls use `F.linear`, which autocast runs in 16 bit with a
cached 16-bit copy of each weight. RMSNorm casts to fp32 itself, because autocast's list of fp32
operations differs between CPU and GPU: a mean of squares loses digits in bf16, overflows in fp16.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CUTOFF_IN_STDS = 3.0
"""Initial weights are truncated at this many standard deviations."""


def truncated_normal_(weight: Tensor, std: float) -> None:
    """Fill a weight in place from a truncated normal distribution."""
    cutoff = CUTOFF_IN_STDS * std
    nn.init.trunc_normal_(weight, std=std, a=-cutoff, b=cutoff)


def at_least_fp32(dtype: torch.dtype) -> torch.dtype:
    """The dtype for statistics over numbers of `dtype`: fp32, or fp64 for fp64."""
    return torch.promote_types(dtype, torch.float32)


class Linear(nn.Module):
    """x W^T; an initial std of sqrt(2 / (in + out)) preserves variance in both directions."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(
            torch.empty(out_features, in_features, device=device, dtype=dtype)
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        truncated_normal_(self.weight, math.sqrt(2.0 / sum(self.weight.shape)))

    def forward(self, x: Tensor) -> Tensor:
        """(..., in_features) to (..., out_features)."""
        return F.linear(x, self.weight)


class Embedding(nn.Module):
    """One vector per token, with an initial std of 1."""

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(
            torch.empty(num_embeddings, embedding_dim, device=device, dtype=dtype)
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        truncated_normal_(self.weight, 1.0)

    def forward(self, tokens: Tensor) -> Tensor:
        """Token ids (...) to vectors (..., embedding_dim)."""
        return F.embedding(tokens, self.weight)


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, computed in fp32."""

    def __init__(
        self,
        d_model: int,
        eps: float = 1e-5,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(d_model, device=device, dtype=dtype))
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

    def __init__(
        self,
        d_model: int,
        d_ff: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.w1 = Linear(d_model, d_ff, device=device, dtype=dtype)
        self.w2 = Linear(d_ff, d_model, device=device, dtype=dtype)
        self.w3 = Linear(d_model, d_ff, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """(..., d_model) to (..., d_model) through d_ff."""
        hidden: Tensor = F.silu(self.w1(x)) * self.w3(x)
        output: Tensor = self.w2(hidden)
        return output
