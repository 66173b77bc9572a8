"""What attention is, in float64, and inputs to try it on."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

TOLERANCE = {torch.float32: 2e-5, torch.float16: 1e-2, torch.bfloat16: 6e-2}
"""Error allowed to outputs and gradients of order one, relative to the largest."""


@dataclass(frozen=True)
class Shape:
    """An attention problem; queries default to as many as keys, heads of keys to all."""

    keys: int
    head_dim: int
    queries: int = 0
    batch: int = 1
    heads: int = 1
    group: int = 1
    """Query heads that share one head of keys and values."""

    def inputs(
        self, dtype: torch.dtype = torch.float32, device: str = "cpu", seed: int = 0
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q, k, v and a gradient of the output."""
        generator = torch.Generator(device).manual_seed(seed)

        def draw(heads: int, rows: int) -> Tensor:
            size = (self.batch, heads, rows, self.head_dim)
            return torch.randn(size, dtype=dtype, device=device, generator=generator)

        queries, kv_heads = self.queries or self.keys, self.heads // self.group
        return (
            draw(self.heads, queries),
            draw(kv_heads, self.keys),
            draw(kv_heads, self.keys),
            draw(self.heads, queries),
        )


def attend(
    q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp by the formula; heads of keys are repeated for their group."""
    if q.dim() > 3:
        group = q.shape[-3] // k.shape[-3]
        k, v = k.repeat_interleave(group, -3), v.repeat_interleave(group, -3)
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    scores = q @ k.transpose(-2, -1) * scale
    if is_causal:
        queries, keys = scores.shape[-2:]
        future = torch.ones(queries, keys, dtype=torch.bool, device=q.device)
        scores = scores.masked_fill(future.triu(1 + keys - queries), -math.inf)
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
Tensors = tuple[Tensor, ...]


def output_and_gradients(
    function: Attention, q: Tensor, k: Tensor, v: Tensor, grad_o: Tensor
) -> Tensors:
    """Output of an attention function, and the gradients of its inputs for one of the output."""
    inputs = [x.detach().requires_grad_() for x in (q, k, v)]
    o = function(*inputs)
    return o.detach(), *torch.autograd.grad(o, inputs, grad_o)


def exact(inputs: Tensors, is_causal: bool, scale: float | None = None) -> Tensors:
    """Output and gradients by the formula in float64."""
    wide = (x.double() for x in inputs)
    return output_and_gradients(lambda q, k, v: attend(q, k, v, is_causal, scale)[0], *wide)


def assert_correct(
    function: Callable[..., Tensor], inputs: Tensors, is_causal: bool, scale: float | None = None
) -> None:
    """Output and all gradients are those of the formula."""
    expected = exact(inputs, is_causal, scale)
    ours = output_and_gradients(partial(function, is_causal=is_causal), *inputs)
    tolerance = TOLERANCE[inputs[0].dtype]
    for name, our, right in zip(("o", "dq", "dk", "dv"), ours, expected, strict=True):
        error = (our.double() - right).abs().max().item()
        assert error <= tolerance * max(1.0, right.abs().max().item()), f"{name} is off by {error}"
