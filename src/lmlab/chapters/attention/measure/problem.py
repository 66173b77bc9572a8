"""One attention problem: its shape, its tensors, the timed passes, and the reference results.

Inputs are random with standard deviation one. Queries, keys and values require gradients, so a
forward pass saves what a backward pass needs, as in training. Backward alone is timed on a retained
graph, so that its time does not include forward.

`flops` follows the usual convention: two matmuls of 2 S^2 d FLOPs forward, five backward (scores
again, dV, dP, dQ, dK), and half of that under a causal mask, even if a variant computes all of it.

Every variant is checked at the very shape that is timed. The naive formula does not fit at long
sequences, so the reference applies it to a block of queries at a time, in fp32 without TF32. Under
a causal mask row norms shrink along the sequence, and one norm over all rows would hide a wrong
tile at the end. The error is therefore the largest |x - expected| / |expected| over blocks of rows.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lmlab.chapters.attention.measure.variants import WrongNumbers
from lmlab.measure.precision import precision_named, tf32_allowed

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]

PRODUCTS = {"forward": 2, "backward": 5, "both": 7}
SCORES_PER_BLOCK = 2**26
"""Scores held at a time: 256 MiB in fp32."""
ROWS_PER_BLOCK = 64
"""Rows over which an error is taken."""
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 4e-3}
"""Largest relative error, by type. TF32 products have errors of about 1e-3 and must not pass as
fp32; 16-bit types hold two to three digits of every score and weight."""
NAMES: tuple[str, ...] = ("output", "grad_q", "grad_k", "grad_v")


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
        """FLOPs of each pass."""
        product = 2.0 * self.batch * (self.heads or 1) * self.sequence**2 * self.head_dim
        share = 0.5 if self.is_causal else 1.0
        return {name: share * count * product for name, count in PRODUCTS.items()}


def shape_of(asked: Mapping[str, Any]) -> Shape:
    """The shape that a point asks for, given directly or as attention in a model of its size."""
    if "num_heads" in asked:
        heads, width = asked["num_heads"], asked["d_model"]
        in_model = {"heads": heads, "head_dim": width // heads, "sequence": asked["context"]}
        asked = {**in_model, **asked}
    same = {key: asked[key] for key in ("batch", "sequence", "head_dim", "precision")}
    return Shape(heads=asked.get("heads"), is_causal=asked["causal"], **same)


class Problem:
    """Random tensors of a shape."""

    def __init__(self, shape: Shape, device: torch.device, seed: int) -> None:
        generator = torch.Generator(device).manual_seed(seed)

        def draw() -> Tensor:
            return torch.randn(shape.tensor, device=device, dtype=shape.dtype, generator=generator)

        self.shape = shape
        self.q, self.k, self.v = (draw().requires_grad_() for _ in range(3))
        self.inputs = self.q, self.k, self.v
        self.grad_o = draw()

    def gradients(self, output: Tensor, *, retain_graph: bool = False) -> tuple[Tensor, ...]:
        """Gradients of queries, keys and values."""
        return torch.autograd.grad(output, self.inputs, self.grad_o, retain_graph=retain_graph)

    def passes(self) -> dict[str, Callable[[Attend], Callable[[], object]]]:
        """Per pass, a function that prepares the call to be timed."""

        def backward(attend: Attend) -> Callable[[], object]:
            output = attend(*self.inputs)
            return lambda: self.gradients(output, retain_graph=True)

        return {
            "forward": lambda attend: lambda: attend(*self.inputs),
            "backward": backward,
            "both": lambda attend: lambda: self.gradients(attend(*self.inputs)),
        }

    def reference(self) -> tuple[Tensor, ...]:
        """Expected output and gradients, in fp32."""
        return reference(*self.inputs, self.grad_o, is_causal=self.shape.is_causal)


@torch.no_grad()
def reference(
    q: Tensor, k: Tensor, v: Tensor, grad_o: Tensor, *, is_causal: bool
) -> tuple[Tensor, ...]:
    """Output and gradients of q, k and v in fp32."""
    flat = [x.detach().float().reshape(-1, *x.shape[-2:]) for x in (q, k, v, grad_o)]
    found = [torch.zeros_like(flat[0]) for _ in NAMES]
    pairs, length, _ = flat[0].shape
    step = max(1, min(length, SCORES_PER_BLOCK // (pairs * length)))
    with tf32_allowed(False):
        for start in range(0, length, step):
            _add_block(found, flat, slice(start, min(start + step, length)), is_causal)
    return tuple(x.reshape(q.shape) for x in found)


def _add_block(found: Sequence[Tensor], flat: Sequence[Tensor], rows: slice, causal: bool) -> None:
    q, k, v, grad_o = flat
    output, grad_q, grad_k, grad_v = found
    end = rows.stop if causal else q.shape[1]
    scale = q.shape[-1] ** -0.5
    keys, values = k[:, :end], v[:, :end]
    scores = q[:, rows] @ keys.transpose(-2, -1) * scale
    if causal:
        position = torch.arange(end, device=q.device)
        scores.masked_fill_(position > position[rows, None], float("-inf"))
    weights = torch.softmax(scores, -1)
    output[:, rows] = weights @ values
    grad_v[:, :end] += weights.transpose(-2, -1) @ grad_o[:, rows]
    grad_weights = grad_o[:, rows] @ values.transpose(-2, -1)
    delta = (grad_o[:, rows] * output[:, rows]).sum(-1, keepdim=True)
    grad_scores = weights * (grad_weights - delta) * scale
    grad_q[:, rows] = grad_scores @ keys
    grad_k[:, :end] += grad_scores.transpose(-2, -1) @ q[:, rows]


def errors(
    found: Sequence[Tensor], expected: Sequence[Tensor], names: Sequence[str] = NAMES
) -> dict[str, float]:
    """The largest relative error of each tensor over blocks of rows."""
    pairs = zip(names, found, expected, strict=True)
    return {name: _largest_error(x.detach(), y) for name, x, y in pairs}


def _largest_error(found: Tensor, expected: Tensor) -> float:
    def by_block(x: Tensor) -> Tensor:
        rows = x.square().sum(-1).reshape(-1, x.shape[-2])
        padded = torch.nn.functional.pad(rows, (0, -rows.shape[-1] % ROWS_PER_BLOCK))
        return padded.unflatten(-1, (-1, ROWS_PER_BLOCK)).sum(-1)

    return float((by_block(found.float() - expected) / by_block(expected)).sqrt().max())


def check(found: Mapping[str, float], dtype: torch.dtype) -> None:
    """Raise `WrongNumbers` if an error is larger than the dtype allows."""
    allowed = TOLERANCE[dtype]
    wrong = {name: error for name, error in found.items() if not error <= allowed}
    if wrong:
        listed = ", ".join(f"{name} {error:.1e}" for name, error in wrong.items())
        raise WrongNumbers(f"relative error of {listed}; allowed: {allowed:.0e}")
