"""The layers of the model: linear map, embedding, RMSNorm, SwiGLU. No biases anywhere.

Weights are drawn where they live. A GPU fills 2.7 billion numbers in a second; drawing them on the
host and copying takes minutes, and the study pays for it at every point.

What autocast does to these layers decides what the study measures, so they are written for it.
Products go through `F.linear`, which autocast runs in 16 bit with a cached 16-bit copy of each
weight. RMSNorm asks for fp32 by itself instead of relying on a list of operations that differs
between CPU and GPU: a mean of squares loses digits in bf16 and overflows in fp16.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CUT_IN_DEVIATIONS = 3.0
"""Initial weights further out than this many standard deviations are redrawn."""


def truncated_normal_(weight: Tensor, deviation: float) -> None:
    """Fill a weight in place from a normal distribution cut at three standard deviations."""
    cut = CUT_IN_DEVIATIONS * deviation
    nn.init.trunc_normal_(weight, std=deviation, a=-cut, b=cut)


def at_least_fp32(dtype: torch.dtype) -> torch.dtype:
    """The type for statistics over numbers of `dtype`: fp32, or fp64 where that is given."""
    return torch.promote_types(dtype, torch.float32)


class Linear(nn.Module):
    """x W^T; deviation sqrt(2 / (in + out)) keeps variance level both forward and backward."""

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
        """Draw the weight anew."""
        truncated_normal_(self.weight, math.sqrt(2.0 / sum(self.weight.shape)))

    def forward(self, x: Tensor) -> Tensor:
        """(..., in_features) to (..., out_features)."""
        return F.linear(x, self.weight)


class Embedding(nn.Module):
    """One vector of deviation 1 for each token."""

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
        """Draw the vectors anew."""
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
        """Start as the plain normalisation."""
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise; the result has the type of x."""
        wide = x.to(at_least_fp32(x.dtype))
        inverse_rms = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + self.eps)
        return (wide * inverse_rms * self.weight).to(x.dtype)


class SwiGLU(nn.Module):
    """w2(silu(w1 x) * w3 x): a feed-forward network whose second branch gates the first."""

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
