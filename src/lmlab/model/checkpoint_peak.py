"""Predicted peak memory with activation checkpointing, from the model's shape alone. No torch.

The peak is in one of three phases. Forward and loss hold the segment inputs and, under autocast, a
16-bit copy of every weight until the pass ends. Backward recomputes one segment, which behaves like
a model of that many blocks, on top of the remaining inputs and the gradients so far; most gradients
exist when the model's first segment is recomputed, which comes last. The optimizer step holds all
gradients and no activations: no strategy can go below it.
"""

import math
from collections.abc import Iterator
from dataclasses import replace

from lmlab.model import peak
from lmlab.model.activations import (
    FP32,
    Device,
    Precision,
    Widths,
    saved_block,
    saved_head,
    widths_of,
)
from lmlab.model.cost import parameter_count
from lmlab.model.shape import ModelShape


def predicted_peak(
    shape: ModelShape, precision: Precision, kind: str, blocks: int = 0, *, device: Device = "cuda"
) -> peak.Stage:
    """The highest stage of a train step; `kind` and `blocks` as in `checkpointing.Strategy`.
    Nested halves recompute one block at a time and keep one input per level."""
    layers = shape.num_layers
    if kind == "none":
        return peak.predicted_peak(shape, precision, "train_step", device=device)
    if kind == "nested":
        blocks, inputs = 1, 1 + math.ceil(math.log2(layers))
    else:
        blocks, inputs = min(blocks, layers), math.ceil(layers / blocks)
    return peak.highest(_stages(shape, widths_of(precision, device), blocks, inputs=inputs))


def best_segment(
    shape: ModelShape, precision: Precision, *, device: Device = "cuda"
) -> tuple[int, peak.Stage]:
    """The segment length with the lowest peak; ties go to the longest, which is the fastest."""
    peaks = {
        length: predicted_peak(shape, precision, "every", length, device=device)
        for length in range(1, shape.num_layers + 1)
    }
    best = min(peaks, key=lambda length: (peaks[length].parts.total, -length))
    return best, peaks[best]


def _stages(shape: ModelShape, widths: Widths, blocks: int, *, inputs: int) -> Iterator[peak.Stage]:
    """Stages of a step that keeps `inputs` inputs and recomputes `blocks` blocks at a time."""
    count = parameter_count(shape)
    stream = FP32 * shape.tokens * shape.d_model
    base = peak.base_parts(shape, "train_step")
    with_inputs = base.plus(activations=inputs * stream)
    copies = widths.weight_copy * (count.linear - count.head)
    yield peak.loss_stage(shape, widths, with_inputs.plus(weight_copies=copies))
    head = with_inputs.plus(
        activations=saved_head(shape, widths), weight_copies=widths.weight_copy * count.head
    )
    yield from peak.head_stages(shape, widths, head)
    last_gradients = FP32 * (count.head + (shape.num_layers - blocks) * peak.block_weights(shape))
    for gradients, waiting in ((FP32 * count.head, inputs), (last_gradients, 1)):
        # The segment's own input is saved by its first block too: one tensor, counted once.
        left = base.plus(activations=(waiting - 1) * stream, gradients=gradients)
        yield from _segment_stages(shape, widths, blocks, left)
    yield peak.embedding_stage(shape, base)
    yield peak.optimizer_stage(shape, base)


def _segment_stages(
    shape: ModelShape, widths: Widths, blocks: int, left: peak.Parts
) -> Iterator[peak.Stage]:
    """Stages of recomputing a segment and of backward through it."""
    segment = replace(shape, num_layers=blocks)
    full = left.plus(
        activations=blocks * saved_block(segment, widths),
        weight_copies=widths.weight_copy * blocks * peak.block_weights(shape),
    )
    # The gradient of the segment's output waits while the segment is recomputed.
    gradient = FP32 * shape.tokens * shape.d_model
    yield from peak.attention_stages(segment, widths, full.plus(workspace=gradient))
    yield from peak.block_stages(segment, widths, full)
