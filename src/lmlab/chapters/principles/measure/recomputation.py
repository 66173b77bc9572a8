"""Recomputation: keep activations for backward, or compute them again.

A stack of feed-forward blocks at several depths. Stored, every block keeps its activations until
backward reaches it: memory grows with depth. Recomputed, each block keeps only its input and runs
forward a second time in backward: a third more arithmetic, and a fraction of the memory. Peak
memory comes from the GPU's allocator; the bytes saved for backward are counted on any device.
"""

from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lmlab.chapters.principles.measure.programs import Program, asked_of, compare
from lmlab.chapters.saved_tensors import saved_storages
from lmlab.jobs.outcome import Outcome
from lmlab.study.points import Point

EXPANSION = 4


class Block(nn.Module):
    """x + W2 gelu(W1 x)."""

    def __init__(self, width: int, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        place = {"device": device, "dtype": dtype, "bias": False}
        self.up = nn.Linear(width, EXPANSION * width, **place)  # type: ignore[arg-type]
        self.down = nn.Linear(EXPANSION * width, width, **place)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        """(rows, width) to the same shape."""
        output: Tensor = x + self.down(nn.functional.gelu(self.up(x)))
        return output


def measure(point: Point, device: torch.device) -> Outcome:
    """Forward and backward at every depth, stored and recomputed."""
    asked = asked_of(point)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    width, deepest = asked["width"], max(asked["depths"])
    blocks = [Block(width, device, dtype) for _ in range(deepest)]
    every_weight = [weight for block in blocks for weight in block.parameters()]
    x = torch.randn(asked["rows"], width, device=device, dtype=dtype).requires_grad_()

    def run(depth: int, recompute: bool) -> Tensor:
        y = x
        for block in blocks[:depth]:
            y = checkpoint(block, y, use_reentrant=False) if recompute else block(y)
        weights = [weight for block in blocks[:depth] for weight in block.parameters()]
        gradient, *_ = torch.autograd.grad(y.square().mean(), [x, *weights])
        return gradient

    programs = {}
    for depth in asked["depths"]:
        expected = run(depth, False)
        for recompute in (False, True):
            call = partial(run, depth, recompute)
            kind = "with" if recompute else "without"
            programs[f"{depth} blocks, {'recomputed' if recompute else 'stored'}"] = Program(
                call=call,
                expected=expected,
                within=1e-5,
                series=kind,
                x=depth,
                pair=kind if depth == deepest else "",
                has_peak=True,
                numbers={
                    "saved_bytes": sum(saved_storages(call, every_weight).values()),
                    "flops": 12 * depth * EXPANSION * asked["rows"] * width**2,
                },
            )
    return compare(programs, asked, device).outcome()
