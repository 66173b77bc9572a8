"""What checkpointing should leave of the peak, from the model's shape alone. No torch.

Three heights compete. In the forward pass and the loss, inputs of segments are kept, and under
autocast a 16-bit copy of every weight until the pass ends, although no graph keeps it. In backward,
a segment is computed again: for its blocks everything is as in a model of that many blocks, on top
of the inputs that are left and of the gradients that are there already; most gradients are there in
the segment that comes last, the first one. And the update of the weights holds all gradients and no
activation at all: below it no strategy can go.
"""

import math
from collections.abc import Iterator
from dataclasses import replace

from lmlab.model.cost import parameter_count
from lmlab.model.footprint import FP32, Device, Precision, _saved_head, _Widths, _widths
from lmlab.model.peak import (
    Moment,
    Parts,
    attention_moments,
    copied,
    embedding_moment,
    head_moments,
    held_throughout,
    highest,
    layer_moments,
    layer_weights,
    loss_moment,
    optimizer,
    predicted_peak,
    saved_layer,
)
from lmlab.model.shape import ModelShape


def predicted_peak_checkpointed(
    shape: ModelShape, precision: Precision, segment: int, *, device: Device = "cuda"
) -> Moment:
    """The highest moment of a train step with segments of so many blocks; 0: no segments."""
    if segment == 0:
        return predicted_peak(shape, precision, "train_step", device=device)
    count = math.ceil(shape.num_layers / segment)
    widths = _widths(precision, device)
    return highest(_moments(shape, widths, min(segment, shape.num_layers), inputs=count))


def predicted_peak_nested(
    shape: ModelShape, precision: Precision, *, device: Device = "cuda"
) -> Moment:
    """The same with halves inside halves: a block at a time, and an input kept on every level."""
    levels = math.ceil(math.log2(shape.num_layers)) if shape.num_layers > 1 else 0
    return highest(_moments(shape, _widths(precision, device), 1, inputs=1 + levels))


def best_segment(
    shape: ModelShape, precision: Precision, *, device: Device = "cuda"
) -> tuple[int, Moment]:
    """The segment length with the lowest predicted peak, the longest of equals: it is fastest."""
    peaks = {
        length: predicted_peak_checkpointed(shape, precision, length, device=device)
        for length in range(1, shape.num_layers + 1)
    }
    lowest = min(moment.parts.total for moment in peaks.values())
    best = max(length for length, moment in peaks.items() if moment.parts.total == lowest)
    return best, peaks[best]


def _moments(shape: ModelShape, widths: _Widths, blocks: int, *, inputs: int) -> Iterator[Moment]:
    """Heights of a step that keeps so many inputs and recomputes so many blocks at a time."""
    count = parameter_count(shape)
    stream = FP32 * shape.tokens * shape.d_model
    held = held_throughout(shape, "train_step")
    kept = held.plus(activations=inputs * stream)
    forward = kept.plus(weight_copies=copied(widths, count.linear - count.head))
    yield loss_moment(shape, widths, forward)
    head = kept.plus(
        activations=_saved_head(shape, widths), weight_copies=copied(widths, count.head)
    )
    yield from head_moments(shape, widths, head)
    done_last = FP32 * (count.head + (shape.num_layers - blocks) * layer_weights(shape))
    for gradients, waiting in ((FP32 * count.head, inputs), (done_last, 1)):
        # The segment's own input is saved by its first block too: one tensor, counted once.
        left = held.plus(activations=(waiting - 1) * stream, gradients=gradients)
        yield from _segment(shape, widths, blocks, left)
    yield embedding_moment(shape, held)
    yield from optimizer(shape, held)


def _segment(shape: ModelShape, widths: _Widths, blocks: int, left: Parts) -> Iterator[Moment]:
    """A segment computed again, and the backward pass through it."""
    segment = replace(shape, num_layers=blocks)
    gradient = FP32 * shape.tokens * shape.d_model
    full = left.plus(
        activations=blocks * saved_layer(segment, widths),
        weight_copies=copied(widths, blocks * layer_weights(shape)),
    )
    # The gradient of the segment's output waits while the segment is computed again.
    yield from attention_moments(segment, widths, full.plus(workspace=gradient))
    yield from layer_moments(segment, widths, full)
