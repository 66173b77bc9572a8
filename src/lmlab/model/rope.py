"""Rotary position embedding: positions as rotations, so that a dot product depends on distance.

Adjacent features form pairs (x0, x1), (x2, x3), ...; pair i of a head of size d is rotated by the
angle position * theta^(-2i/d). (The pairing is part of a checkpoint format: models that pair x_i
with x_(i + d/2) have the same weights in another order.)

A pair becomes (x0 cos - x1 sin, x1 cos + x0 sin). With each cosine stored twice and each sine as
(-sin, sin), that is `x * cos + swap(x) * sin` over the whole head: three memory-bound kernels
instead of seven on strided halves, and no saved activations, because the tables need no gradient.

The tables are computed in double precision (an angle of 1000 rad in fp32 is already off by 6e-5),
stored in fp32, and cast to the dtype of the activations when used. They follow from the
hyperparameters, so they are not part of a checkpoint.
"""

import torch
from torch import Tensor, nn


class RotaryEmbedding(nn.Module):
    """Tables of cosines and sines for the first `context_length` positions."""

    cos: Tensor
    sin: Tensor

    def __init__(
        self,
        head_dim: int,
        context_length: int,
        theta: float,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.theta = theta
        for name in ("cos", "sin"):
            table = torch.empty(context_length, head_dim, device=device, dtype=dtype)
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
