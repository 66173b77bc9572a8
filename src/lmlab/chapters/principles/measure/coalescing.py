"""Coalescing: neighboring threads should read neighboring addresses.

One kernel copies every stride-th number: the useful bytes stay the same, but are spread over more
sectors. Another sums the rows or the columns of a row-major matrix; given a tile of columns per
program, it reads whole sectors for column sums too. A CPU runs both as PyTorch operations. Only
useful bytes are counted, so the rate is the effective bandwidth.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from lmlab.chapters.principles.measure.programs import Program, asked_of, compare
from lmlab.jobs.outcome import Outcome
from lmlab.kernels.principles_memory import matrix_sum, strided_copy
from lmlab.study.points import Point

SUMS: dict[str, tuple[int, int, int]] = {
    "row sums": (1, 1, 8192),
    "column sums, a column per program": (0, 1, 8192),
    "column sums, a tile per program": (0, 64, 128),
}
"""Dimension, outer and inner tile of each sum; the inner one is cut to the matrix."""


def measure(point: Point, device: torch.device) -> Outcome:
    """Copies by stride, then sums."""
    asked = asked_of(point)
    programs = {**copies(asked, device), **sums(asked["side"], device)}
    return compare(programs, asked, device).outcome()


def copies(asked: dict[str, Any], device: torch.device) -> dict[str, Program]:
    """A copy per stride."""
    strides, size = asked["strides"], asked["numbers"]
    x = torch.randn(size * max(strides), device=device)
    out = torch.empty(size, device=device)

    def run(stride: int) -> Tensor:
        if device.type == "cuda":
            return strided_copy(x, stride, out)
        return out.copy_(x[: size * stride : stride])

    pairs = {min(strides): "with", max(strides): "without"}
    return {
        f"stride {stride}": Program(
            call=partial(run, stride),
            expected=x[: size * stride : stride],
            series="copy",
            x=stride,
            pair=pairs.get(stride, ""),
            numbers={"bytes": 8 * size},
        )
        for stride in strides
    }


def sums(side: int, device: torch.device) -> dict[str, Program]:
    """Row and column sums of a square matrix."""
    matrix = torch.randn(side, side, device=device)

    def run(dim: int, outer: int, inner: int) -> Tensor:
        if device.type == "cuda":
            return matrix_sum(matrix, dim, outer=outer, inner=min(inner, side))
        return matrix.sum(dim)

    kinds = SUMS if device.type == "cuda" else dict(list(SUMS.items())[:2])
    return {
        name: Program(
            call=partial(run, *kind),
            expected=matrix.double().sum(kind[0]),
            within=1e-4,
            series="sum",
            x=side,
            numbers={"bytes": 4 * side * side},
        )
        for name, kind in kinds.items()
    }
