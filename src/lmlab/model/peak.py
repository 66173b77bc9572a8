"""Predicted peak memory of a step: the stage at which it occurs and what it consists of. No torch.

Memory is highest at one of a few known stages of a step; it changes linearly from layer to layer,
so only the first and the last matter. Each stage lists its bytes by category, to show where a
measurement differs from the prediction. A forward pass that keeps its graph is a separate mode,
because that is what published forward peaks refer to. It peaks either at the loss, or in the last
layer's attention, where the scores exist two or three times.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Literal, get_args

from lmlab.model.activations import (
    FP32,
    Device,
    Precision,
    Widths,
    logits_bytes,
    saved_block,
    saved_feed_forward,
    saved_head,
    widths_of,
)
from lmlab.model.cost import check_choice, parameter_count
from lmlab.model.shape import ModelShape

PeakMode = Literal["forward", "forward_graph", "forward_backward", "train_step"]
Phase = Literal["forward", "backward", "optimizer"]

TOKEN_ID = 8


@dataclass(frozen=True, kw_only=True)
class Parts:
    """Bytes allocated at one time, by category."""

    parameters: int = 0
    gradients: int = 0
    optimizer_state: int = 0
    weight_copies: int = 0
    activations: int = 0
    workspace: int = 0
    other: int = 0

    @property
    def total(self) -> int:
        return sum(getattr(self, field.name) for field in fields(self))

    def plus(self, **more: int) -> "Parts":
        """A copy with bytes added to (or, if negative, removed from) some categories."""
        return replace(self, **{name: getattr(self, name) + value for name, value in more.items()})


@dataclass(frozen=True)
class Stage:
    """A point of a step at which memory can be highest."""

    phase: Phase
    name: str
    parts: Parts


def predicted_peak(
    shape: ModelShape, precision: Precision, mode: PeakMode, *, device: Device = "cuda"
) -> Stage:
    """The highest stage of one step of the model with naive attention, fp32 weights and AdamW."""
    check_choice("mode", mode, get_args(PeakMode))
    return highest(_stages(shape, widths_of(precision, device), mode))


def highest(stages: Iterable[Stage]) -> Stage:
    """The stage with the most bytes; ties go to the first."""
    return max(stages, key=lambda stage: stage.parts.total)


def _stages(shape: ModelShape, widths: Widths, mode: PeakMode) -> Iterator[Stage]:
    base = base_parts(shape, mode)
    if mode == "forward":
        yield from _inference_stages(shape, widths, base)
        return
    yield from _graph_stages(shape, widths, base)
    if mode != "forward_graph":
        yield from _backward_stages(shape, widths, base)
    if mode == "train_step":
        yield optimizer_stage(shape, base)


def base_parts(shape: ModelShape, mode: PeakMode) -> Parts:
    """Memory held throughout the step."""
    parameters = FP32 * parameter_count(shape).total
    return Parts(
        parameters=parameters,
        optimizer_state=2 * parameters if mode == "train_step" else 0,
        other=rope_table_bytes(shape) + input_bytes(shape, mode),
    )


def rope_table_bytes(shape: ModelShape) -> int:
    return 2 * FP32 * shape.context * shape.head_dim


def input_bytes(shape: ModelShape, mode: PeakMode) -> int:
    """Token ids, and as many targets if there is a loss."""
    return (1 if mode == "forward" else 2) * TOKEN_ID * shape.tokens


def block_weights(shape: ModelShape) -> int:
    """Weights of one block that take part in matmuls."""
    count = parameter_count(shape)
    return (count.attention + count.feed_forward) // shape.num_layers


def optimizer_stage(shape: ModelShape, base: Parts) -> Stage:
    """AdamW's only temporary is as large as the largest parameter."""
    largest = shape.d_model * max(shape.vocab_size, shape.d_ff, shape.d_model)
    gradients = FP32 * parameter_count(shape).total
    parts = base.plus(gradients=gradients, workspace=FP32 * largest)
    return Stage("optimizer", "update of the largest parameter", parts)


def _graph_stages(shape: ModelShape, widths: Widths, base: Parts) -> Iterator[Stage]:
    """Stages of a forward pass that keeps its graph: last layer's attention, then the loss."""
    count = parameter_count(shape)
    blocks = base.plus(
        activations=shape.num_layers * saved_block(shape, widths),
        weight_copies=widths.weight_copy * (count.linear - count.head),
    )
    yield from attention_stages(shape, widths, blocks)
    yield loss_stage(shape, widths, blocks)


def loss_stage(shape: ModelShape, widths: Widths, blocks: Parts) -> Stage:
    """The loss, at the end of forward; `blocks` is the memory held after the blocks."""
    parts = blocks.plus(
        activations=saved_head(shape, widths),
        weight_copies=widths.weight_copy * parameter_count(shape).head,
        workspace=_loss_workspace(widths) * shape.tokens * shape.vocab_size,
    )
    return Stage("forward", "loss", parts)


def _loss_workspace(widths: Widths) -> int:
    """Bytes per logit of the loss's temporaries: a CPU first casts 16-bit logits into a copy."""
    casts_into_copy = widths.is_autocast and not widths.scores_cast
    return 2 * FP32 if casts_into_copy else FP32


def attention_stages(shape: ModelShape, widths: Widths, after: Parts) -> Iterator[Stage]:
    """The two highest stages of a block's attention, from the memory held after the block."""
    output = widths.matmul * shape.tokens * shape.d_model
    later_weights = 3 * shape.d_model * shape.d_ff + shape.d_model**2
    here = after.plus(
        activations=-saved_feed_forward(shape, widths) - output,
        weight_copies=-widths.weight_copy * later_weights,
        workspace=widths.matmul * shape.scores,  # masked scores, still referenced
    )
    softmax_input = widths.softmax * shape.scores if widths.scores_cast else 0
    softmax = here.plus(activations=-widths.scores_cast * shape.scores, workspace=softmax_input)
    yield Stage("forward", "softmax", softmax)
    # The result of the matmul, before its heads are joined.
    yield Stage("forward", "weights times values", here.plus(workspace=output))


def _backward_stages(shape: ModelShape, widths: Widths, base: Parts) -> Iterator[Stage]:
    """Saved tensors are freed layer by layer while gradients take their place."""
    count = parameter_count(shape)
    layers, saved = shape.num_layers, saved_block(shape, widths)
    everything = base.plus(
        activations=layers * saved + saved_head(shape, widths),
        weight_copies=widths.weight_copy * count.linear,
    )
    yield from head_stages(shape, widths, everything)
    weights = block_weights(shape)
    for done in sorted({0, layers - 1}):
        left = base.plus(
            activations=(layers - done) * saved,
            weight_copies=widths.weight_copy * (layers - done) * weights,
            gradients=FP32 * (count.head + done * weights),
        )
        yield from block_stages(shape, widths, left)
    yield embedding_stage(shape, base)


def head_stages(shape: ModelShape, widths: Widths, everything: Parts) -> Iterator[Stage]:
    """Backward of the loss and the head."""
    count = parameter_count(shape)
    # The fp32 gradient of the logits and its 16-bit copy, or the loss's own temporaries.
    per_logit = max(FP32 + widths.weight_copy, _loss_workspace(widths))
    gradient = per_logit * shape.tokens * shape.vocab_size
    yield Stage("backward", "loss", everything.plus(workspace=gradient))
    # The logits are freed; their gradient and the head's exist.
    logits = logits_bytes(shape, widths)
    head = everything.plus(
        activations=-logits,
        workspace=logits + widths.weight_copy * count.head,
        gradients=FP32 * count.head,
    )
    yield Stage("backward", "head", head)


def block_stages(shape: ModelShape, widths: Widths, left: Parts) -> Iterator[Stage]:
    """The two highest stages of a block's backward, feed-forward first."""
    stream = FP32 * shape.tokens * shape.d_model
    matrix = shape.d_model * shape.d_ff
    # Gradients of the product and both factors; w2 is done and its input freed.
    gate = left.plus(
        workspace=stream + 2 * widths.matmul * shape.tokens * shape.d_ff,
        gradients=FP32 * matrix,
        weight_copies=-widths.weight_copy * matrix,
    )
    yield Stage("backward", "gate", gate)
    # Gradients of the softmax's result and input; the matmul's 16-bit operand is freed.
    done = 3 * matrix + shape.d_model**2
    softmax = left.plus(
        activations=-saved_feed_forward(shape, widths) - widths.scores_cast * shape.scores,
        gradients=FP32 * done,
        weight_copies=-widths.weight_copy * done,
        workspace=stream + 2 * widths.softmax * shape.scores,
    )
    yield Stage("backward", "softmax", softmax)


def embedding_stage(shape: ModelShape, base: Parts) -> Stage:
    """The end of backward: all parameter gradients, plus the residual stream's."""
    gradients = FP32 * parameter_count(shape).total
    parts = base.plus(gradients=gradients, workspace=FP32 * shape.tokens * shape.d_model)
    return Stage("backward", "embedding", parts)


def _inference_stages(shape: ModelShape, widths: Widths, base: Parts) -> Iterator[Stage]:
    """Without a graph, tensors are freed once unreferenced: the last layer, then the head."""
    count = parameter_count(shape)
    stream = shape.tokens * shape.d_model
    matrix = shape.d_model * shape.d_ff
    layer = base.plus(
        weight_copies=widths.weight_copy * (count.linear - count.head),
        activations=2 * FP32 * stream,
    )
    attention = layer.plus(
        weight_copies=-widths.weight_copy * (3 * matrix + shape.d_model**2),
        activations=3 * widths.matmul * stream,
    )
    # Scores, their fp32 copy where autocast makes one, the result.
    softmax = widths.matmul + widths.softmax * (2 if widths.scores_cast else 1)
    yield Stage("forward", "softmax", attention.plus(activations=softmax * shape.scores))
    # Scores, weights, their 16-bit copy; contiguous values, the result.
    scores = (widths.matmul + widths.softmax + widths.scores_cast) * shape.scores
    product = attention.plus(activations=scores + 2 * widths.matmul * stream)
    yield Stage("forward", "weights times values", product)
    gate = FP32 * stream + 3 * widths.matmul * shape.tokens * shape.d_ff
    copies = -widths.weight_copy * matrix
    yield Stage("forward", "gate", layer.plus(weight_copies=copies, activations=gate))
    head = widths.weight_copy * stream + logits_bytes(shape, widths)
    copies = widths.weight_copy * count.head
    yield Stage("forward", "head", layer.plus(weight_copies=copies, activations=head))
