"""The memory of naive attention, tensor by tensor, as the formula says it.

softmax(Q K^T / sqrt(d)) V is five operations, each of which writes its result to memory. What stays
for backward is what a derivative needs: softmax keeps its result, the weights, which the second
product needs as well; a mask is kept where there is one; queries, keys and values are there anyway.
So one tensor of batch x sequence x sequence stays, whatever the head dimension. Forward itself
holds two: each operation reads one and writes another, up to softmax and the product after it.

The peak comes in backward: while softmax is being differentiated, the weights, the gradient of the
weights, the product of these two, which PyTorch writes to memory on a GPU before it sums its rows,
and the gradient of the scores are there at once, four such tensors. A single word of this that is
wrong shows in the difference to what the allocator counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lmlab.chapters.attention.measure.problem import Attend, Problem, Shape

Row = dict[str, Any]


def in_forward(shape: Shape) -> list[Row]:
    """What is held while the weights are multiplied with the values."""
    held = before_backward(shape)
    return [*held[:4], _scores(shape, "scores"), *held[4:]]


def before_backward(shape: Shape) -> list[Row]:
    """What is held between forward and backward."""
    mask = [_mask(shape)] if shape.is_causal else []
    inputs = [_vectors(shape, name) for name in ("queries", "keys", "values", "gradient of output")]
    return [*inputs, _scores(shape, "weights"), *mask, _vectors(shape, "output")]


def at_peak(shape: Shape) -> list[Row]:
    """What is held in backward while softmax is differentiated."""
    return [
        *before_backward(shape),
        _scores(shape, "gradient of weights"),
        _scores(shape, "weights × their gradient"),
        _scores(shape, "gradient of scores"),
        _vectors(shape, "gradient of values"),
    ]


def total_bytes(rows: Sequence[Row]) -> int:
    """The sum of an account."""
    return sum(row["bytes"] for row in rows)


def saved_bytes(attend: Attend, problem: Problem) -> int:
    """Bytes that a forward pass keeps for backward beyond its inputs, as autograd sees them."""
    given = {x.untyped_storage().data_ptr() for x in problem.inputs}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in given:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = attend(*problem.inputs)
    del output
    return sum(kept.values())


def _scores(shape: Shape, name: str) -> Row:
    size = [*shape.tensor[:-2], shape.sequence, shape.sequence]
    return _row(name, size, shape.dtype)


def _mask(shape: Shape) -> Row:
    return _row("mask", [shape.sequence, shape.sequence], torch.bool)


def _vectors(shape: Shape, name: str) -> Row:
    return _row(name, list(shape.tensor), shape.dtype)


def _row(name: str, size: list[int], dtype: torch.dtype) -> Row:
    count = 1
    for length in size:
        count *= length
    return {"tensor": name, "shape": size, "bytes": count * dtype.itemsize}
