"""One attention problem: its shape, its tensors, and the passes that are timed over it.

Inputs are random with standard deviation one, drawn on the device. Queries, keys and values require
gradients, so a forward pass saves what a backward pass needs, as in training. Backward alone is
timed on a retained graph, since the forward pass before it is not its time.

`flops` follows the usual convention: two products of 2 S^2 d operations forward, five backward
(scores again, dV, dP, dQ, dK), and half of each under a causal mask. A variant that computes the
masked half as well gets no credit for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lmlab.measure.precision import precision_named

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]

PRODUCTS = {"forward": 2, "backward": 5, "both": 7}


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Shape and type of a problem."""

    batch: int
    heads: int | None
    """None: tensors of (batch, sequence, head_dim)."""
    sequence: int
    head_dim: int
    precision: str
    is_causal: bool

    @property
    def dtype(self) -> torch.dtype:
        return precision_named(self.precision).dtype

    @property
    def tf32(self) -> bool:
        return precision_named(self.precision).tf32

    @property
    def tensor(self) -> tuple[int, ...]:
        """Shape of queries, keys, values and output."""
        leading = (self.batch,) if self.heads is None else (self.batch, self.heads)
        return (*leading, self.sequence, self.head_dim)

    def flops(self) -> dict[str, float]:
        """Operations of each pass."""
        product = 2.0 * self.batch * (self.heads or 1) * self.sequence**2 * self.head_dim
        share = 0.5 if self.is_causal else 1.0
        return {name: share * count * product for name, count in PRODUCTS.items()}


def shape_of(asked: Mapping[str, Any]) -> Shape:
    """The shape that a point asks for: its own, or that of attention in a model of its size."""
    of_model = {}
    if "num_heads" in asked:
        heads = asked["num_heads"]
        head_dim = asked["d_model"] // heads
        of_model = {"heads": heads, "head_dim": head_dim, "sequence": asked["context"]}
    found = {**of_model, **asked}
    return Shape(
        batch=found["batch"],
        heads=found.get("heads"),
        sequence=found["sequence"],
        head_dim=found["head_dim"],
        precision=found["precision"],
        is_causal=found["causal"],
    )


class Problem:
    """Random tensors of a shape."""

    def __init__(self, shape: Shape, device: torch.device, seed: int) -> None:
        generator = torch.Generator(device).manual_seed(seed)

        def draw() -> Tensor:
            return torch.randn(shape.tensor, device=device, dtype=shape.dtype, generator=generator)

        self.shape = shape
        self.q, self.k, self.v = (draw().requires_grad_() for _ in range(3))
        self.grad_o = draw()

    @property
    def inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.q, self.k, self.v

    def gradients(self, output: Tensor, *, retain_graph: bool = False) -> tuple[Tensor, ...]:
        """Gradients of queries, keys and values."""
        return torch.autograd.grad(output, self.inputs, self.grad_o, retain_graph=retain_graph)

    def passes(self) -> dict[str, Callable[[Attend], Callable[[], object]]]:
        """For each pass, what prepares the call that is timed."""

        def backward(attend: Attend) -> Callable[[], object]:
            output = attend(*self.inputs)
            return lambda: self.gradients(output, retain_graph=True)

        return {
            "forward": lambda attend: lambda: attend(*self.inputs),
            "backward": backward,
            "both": lambda attend: lambda: self.gradients(attend(*self.inputs)),
        }
