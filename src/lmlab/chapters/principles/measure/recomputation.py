"""Recomputation: keep activations for backward, or compute them again.

A stack of feed-forward blocks over depth. Stored, every block keeps its activations until backward
reaches it: memory grows with depth. Recomputed, each block keeps its input alone and runs forward a
second time in backward: a third more arithmetic, and a fraction of the memory. Peak memory comes
from the allocator on a GPU; the bytes saved for backward are counted everywhere.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from lmlab.chapters.principles.measure.programs import Program, compare, random, relative_error
from lmlab.jobs.outcome import Outcome
from lmlab.measure.device import peak_memory_bytes, reset_peak_memory
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
    asked = {**point.settings, **point.parameters}
    torch.manual_seed(asked["seed"])
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    width, deepest = asked["width"], max(asked["depths"])
    blocks = [Block(width, device, dtype) for _ in range(deepest)]
    x = random(asked["rows"], width, device=device, dtype=dtype).requires_grad_()

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
                check=partial(error, call, expected),
                within=1e-5,
                series=kind,
                pair=kind if depth == deepest else "",
                x=depth,
                numbers={
                    "peak_memory": (peak_of(call, device), "B"),
                    "saved_bytes": (saved_bytes(call, blocks), "B"),
                    "flops": (12 * depth * EXPANSION * asked["rows"] * width**2, "FLOP"),
                },
            )
    return compare(programs, asked, device)


def error(call: Callable[[], Tensor], expected: Tensor) -> float:
    """Of the gradient."""
    return relative_error(call(), expected)


def peak_of(call: Callable[[], Tensor], device: torch.device) -> int | None:
    """Peak above what exists before the call; None on a CPU."""
    if device.type != "cuda":
        return None
    before = torch.cuda.memory_allocated(device)
    reset_peak_memory(device)
    call()
    return (peak_memory_bytes(device) or 0) - before


def saved_bytes(call: Callable[[], Tensor], blocks: list[Block]) -> int:
    """Bytes that forward saves for backward, each storage once; weights exist anyway."""
    weights = {w.untyped_storage().data_ptr() for block in blocks for w in block.parameters()}
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        call()
    return sum(saved.values())
