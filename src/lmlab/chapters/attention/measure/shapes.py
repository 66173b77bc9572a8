"""Every variant at a shape of the study's models: batch, heads, head dimension and context.

`benchmark` has one head, which fills the GPU only if its sequence is long. A model has many heads
and short sequences: other kernels and tiles may be faster there, and launching a kernel can take
longer than running it. Tensors are laid out as in a model, whose projections give (batch, sequence,
heads, head_dim).

Records: see `benchmark`.
"""

import torch
from torch import Tensor

from lmlab.chapters.attention.measure import benchmark
from lmlab.chapters.attention.measure.problem import Problem, Shape
from lmlab.jobs.outcome import Outcome
from lmlab.study.points import Point


def measure(point: Point, device: torch.device) -> Outcome:
    """Measure one shape."""
    return benchmark.measure(point, device, InModel)


class InModel(Problem):
    """Random tensors in the layout of a model."""

    def __init__(self, shape: Shape, device: torch.device, seed: int) -> None:
        super().__init__(shape, device, seed)
        self.q, self.k, self.v = (laid_out(x.detach()).requires_grad_() for x in self.inputs)
        self.inputs = self.q, self.k, self.v
        self.grad_o = laid_out(self.grad_o)


def laid_out(x: Tensor) -> Tensor:
    """The same tensor with the heads of a token next to each other in memory."""
    return x.transpose(-3, -2).contiguous().transpose(-3, -2)
