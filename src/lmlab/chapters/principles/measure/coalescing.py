"""Coalescing: neighboring threads should read neighboring addresses.

A copy of every stride-th number, whose useful bytes stay the same while the sectors they lie in
become more, and sums over the rows and over the columns of a row-major matrix by one and the same
program. The column sums are then computed again with a tile of columns per program, which reads
whole sectors. On a CPU the same copies and sums run as PyTorch operations: its cache lines are 64
bytes.

Bytes are those that are needed, so the rate is the effective bandwidth.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from lmlab.chapters.principles.measure.programs import Program, compare, random, relative_error
from lmlab.jobs.outcome import Outcome
from lmlab.kernels.principles_memory import matrix_sum, strided_copy
from lmlab.study.points import Point

SUMS: dict[str, tuple[int, dict[str, int]]] = {
    "row sums": (1, {"outer": 1, "inner": 8192}),
    "column sums, a column per program": (0, {"outer": 1, "inner": 8192}),
    "column sums, a tile per program": (0, {"outer": 64, "inner": 128}),
}
"""Dimension and tile of each sum; `inner` is cut to the matrix."""


def measure(point: Point, device: torch.device) -> Outcome:
    """Copies by stride, then sums."""
    asked = {**point.settings, **point.parameters}
    torch.manual_seed(asked["seed"])
    return compare({**copies(asked, device), **sums(asked, device)}, asked, device)


def copies(asked: dict[str, Any], device: torch.device) -> dict[str, Program]:
    """A copy per stride."""
    strides, size = asked["strides"], asked["numbers"]
    x = random(size * max(strides), device=device)
    out = torch.empty(size, device=device)

    def run(stride: int) -> Tensor:
        if device.type == "cuda":
            return strided_copy(x, stride, out)
        return out.copy_(x[: size * stride : stride])

    def error(stride: int) -> float:
        return relative_error(run(stride), x[: size * stride : stride])

    pairs = {min(strides): "with", max(strides): "without"}
    return {
        f"stride {stride}": Program(
            call=partial(run, stride),
            check=partial(error, stride),
            series="copy",
            x=stride,
            pair=pairs.get(stride, ""),
            numbers={"bytes": (8 * size, "B")},
        )
        for stride in strides
    }


def sums(asked: dict[str, Any], device: torch.device) -> dict[str, Program]:
    """Row and column sums of a square matrix."""
    side = asked["side"]
    matrix = random(side, side, device=device)

    def run(dim: int, outer: int, inner: int) -> Tensor:
        if device.type == "cuda":
            return matrix_sum(matrix, dim, outer=outer, inner=min(inner, side))
        return matrix.sum(dim)

    def error(dim: int, call: Any) -> float:
        return relative_error(call(), matrix.double().sum(dim))

    kinds = SUMS if device.type == "cuda" else dict(list(SUMS.items())[:2])
    programs = {}
    for name, (dim, tile) in kinds.items():
        call = partial(run, dim, **tile)
        programs[name] = Program(
            call=call,
            check=partial(error, dim, call),
            within=1e-4,
            series="sum",
            x=side,
            numbers={"bytes": (4 * side * side, "B")},
        )
    return programs
