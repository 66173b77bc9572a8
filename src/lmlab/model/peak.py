"""The cost model's peak, taken apart: at which moment it comes, and what it is made of. No torch.

`footprint` says how much; to find out where a measurement differs from it, the same moments are
spelled out here with a part for every category. Added is the forward pass that keeps its graph and
stops there, which is what published peaks of a forward pass are: its height is either the loss,
which holds one fp32 buffer as wide as the logits, or attention in the last layer, where the scores
exist two or three times while everything before is kept already.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Literal, get_args

from lmlab.model.cost import ParameterCount, check_name, parameter_count
from lmlab.model.footprint import (
    FP32,
    TOKEN_ID,
    Device,
    Precision,
    _logits,
    _saved_attention,
    _saved_feed_forward,
    _saved_head,
    _Widths,
    _widths,
)
from lmlab.model.shape import ModelShape

PeakMode = Literal["forward", "forward_graph", "forward_backward", "train_step"]


@dataclass(frozen=True, kw_only=True)
class Parts:
    """Bytes that exist at one moment, by what they are for."""

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
        """The same moment with more, or less, of some parts."""
        return replace(self, **{name: getattr(self, name) + value for name, value in more.items()})


@dataclass(frozen=True, kw_only=True)
class Moment:
    """A moment at which memory can be highest."""

    phase: Literal["forward", "backward", "optimizer"]
    name: str
    parts: Parts


def predicted_peak(
    shape: ModelShape, precision: Precision, mode: PeakMode, *, device: Device = "cuda"
) -> Moment:
    """The highest moment of one step of the model with naive attention, fp32 weights and AdamW."""
    check_name("mode", mode, get_args(PeakMode))
    return highest(moments(shape, _widths(precision, device), mode))


def highest(candidates: Iterable[Moment]) -> Moment:
    """The moment with the most bytes; the first of equals."""
    return max(candidates, key=lambda moment: moment.parts.total)


def moments(shape: ModelShape, widths: _Widths, mode: PeakMode) -> Iterator[Moment]:
    """Every moment of the mode that could be the highest."""
    held = held_throughout(shape, mode)
    if mode == "forward":
        yield from _inference(shape, widths, held)
        return
    yield from keeping_graph(shape, widths, held)
    if mode == "forward_graph":
        return
    yield from _backward(shape, widths, held)
    if mode == "train_step":
        yield from optimizer(shape, held)


def held_throughout(shape: ModelShape, mode: PeakMode) -> Parts:
    """What is there before the step and after it."""
    total = FP32 * parameter_count(shape).total
    inputs = (1 if mode == "forward" else 2) * TOKEN_ID * shape.tokens
    return Parts(
        parameters=total,
        optimizer_state=2 * total if mode == "train_step" else 0,
        other=2 * FP32 * shape.context * shape.head_dim + inputs,
    )


def copied(widths: _Widths, weights: int) -> int:
    """Bytes of autocast's copies of so many weights."""
    return widths.product * weights if widths.is_autocast else 0


def saved_layer(shape: ModelShape, widths: _Widths) -> int:
    """What autograd keeps of one block."""
    return _saved_attention(shape, widths) + _saved_feed_forward(shape, widths)


def layer_weights(shape: ModelShape) -> int:
    """Weights of one block that take part in products."""
    count = parameter_count(shape)
    return (count.attention + count.feed_forward) // shape.num_layers


def optimizer(shape: ModelShape, held: Parts) -> Iterator[Moment]:
    """AdamW's one temporary is as large as the largest parameter."""
    largest = shape.d_model * max(shape.vocab_size, shape.d_ff, shape.d_model)
    total = FP32 * parameter_count(shape).total
    parts = held.plus(gradients=total, workspace=FP32 * largest)
    yield Moment(phase="optimizer", name="update of the largest parameter", parts=parts)


def keeping_graph(shape: ModelShape, widths: _Widths, held: Parts) -> Iterator[Moment]:
    """Heights of a forward pass that keeps all: attention of the last layer, and the loss."""
    count = parameter_count(shape)
    blocks = held.plus(
        activations=shape.num_layers * saved_layer(shape, widths),
        weight_copies=copied(widths, count.linear - count.head),
    )
    yield from attention_moments(shape, widths, blocks)
    yield loss_moment(shape, widths, blocks)


def loss_moment(shape: ModelShape, widths: _Widths, blocks: Parts) -> Moment:
    """The end of forward, from what the blocks have left: one buffer as wide as the logits."""
    return Moment(
        phase="forward",
        name="loss",
        parts=blocks.plus(
            activations=_saved_head(shape, widths),
            weight_copies=copied(widths, parameter_count(shape).head),
            workspace=_loss_buffers(widths) * shape.tokens * shape.vocab_size,
        ),
    )


def _loss_buffers(widths: _Widths) -> int:
    """Bytes a logit that the loss works in: a CPU casts 16-bit logits into a copy first."""
    casts_in_a_copy = widths.is_autocast and widths.softmax == widths.product
    return 2 * FP32 if casts_in_a_copy else FP32


def attention_moments(shape: ModelShape, widths: _Widths, after: Parts) -> Iterator[Moment]:
    """Heights within a block's attention, from what is there once the block is done."""
    stream = shape.tokens * shape.d_model
    casts = widths.softmax != widths.product
    later_weights = 3 * shape.d_model * shape.d_ff + shape.d_model**2
    mixed = widths.product * stream
    here = after.plus(
        activations=-_saved_feed_forward(shape, widths) - mixed,
        weight_copies=-copied(widths, later_weights),
        workspace=widths.product * shape.scores,  # the masked scores, which a name still holds
    )
    yield Moment(
        phase="forward",
        name="softmax",
        parts=here.plus(
            activations=-widths.product * shape.scores if casts else 0,
            workspace=widths.softmax * shape.scores if casts else 0,
        ),
    )
    # The product's result, before its heads are joined.
    yield Moment(phase="forward", name="weights times values", parts=here.plus(workspace=mixed))


def _backward(shape: ModelShape, widths: _Widths, held: Parts) -> Iterator[Moment]:
    """Saved tensors are given back layer by layer while gradients take their place."""
    count = parameter_count(shape)
    layers, layer = shape.num_layers, saved_layer(shape, widths)
    everything = held.plus(
        activations=layers * layer + _saved_head(shape, widths),
        weight_copies=copied(widths, count.linear),
    )
    yield from head_moments(shape, widths, everything)

    blocks = held.plus(
        activations=layers * layer,
        weight_copies=copied(widths, count.linear - count.head),
        gradients=FP32 * count.head,
    )
    weights = layer_weights(shape)
    for done in sorted({0, layers - 1}):
        left = blocks.plus(
            activations=-done * layer,
            gradients=done * FP32 * weights,
            weight_copies=-done * copied(widths, weights),
        )
        yield from layer_moments(shape, widths, left)
    yield embedding_moment(shape, held)


def head_moments(shape: ModelShape, widths: _Widths, everything: Parts) -> Iterator[Moment]:
    """Backward through the loss and the head."""
    count = parameter_count(shape)
    copy = copied(widths, 1)
    # The fp32 gradient of the logits, and its 16-bit copy; before that, what the loss itself takes.
    gradient = max(FP32 + copy, _loss_buffers(widths)) * shape.tokens * shape.vocab_size
    yield Moment(phase="backward", name="loss", parts=everything.plus(workspace=gradient))
    # The logits are gone; their gradient and the head's are there.
    logits = _logits(shape, widths)
    yield Moment(
        phase="backward",
        name="head",
        parts=everything.plus(
            activations=-logits, workspace=logits + copy * count.head, gradients=FP32 * count.head
        ),
    )


def layer_moments(shape: ModelShape, widths: _Widths, left: Parts) -> Iterator[Moment]:
    """The two heights within one block's backward pass, feed-forward first."""
    stream = FP32 * shape.tokens * shape.d_model
    matrix = shape.d_model * shape.d_ff
    # Gradients of the product and both factors; w2 is done and its input given back.
    yield Moment(
        phase="backward",
        name="gate",
        parts=left.plus(
            workspace=stream + 2 * widths.product * shape.tokens * shape.d_ff,
            gradients=FP32 * matrix,
            weight_copies=-copied(widths, matrix),
        ),
    )
    # Gradients of the softmax's result and input; the product's 16-bit operand is given back.
    casts = widths.softmax != widths.product
    square = shape.d_model**2
    yield Moment(
        phase="backward",
        name="softmax",
        parts=left.plus(
            activations=-_saved_feed_forward(shape, widths)
            - (widths.product * shape.scores if casts else 0),
            gradients=FP32 * (3 * matrix + square),
            weight_copies=-copied(widths, 3 * matrix + square),
            workspace=stream + 2 * widths.softmax * shape.scores,
        ),
    )


def embedding_moment(shape: ModelShape, held: Parts) -> Moment:
    """The end of backward: all gradients, and that of the stream."""
    return Moment(
        phase="backward",
        name="embedding",
        parts=held.plus(
            gradients=FP32 * parameter_count(shape).total,
            workspace=FP32 * shape.tokens * shape.d_model,
        ),
    )


def _inference(shape: ModelShape, widths: _Widths, held: Parts) -> Iterator[Moment]:
    """Without a graph a tensor lives as long as a name holds it: the last layer, then the head."""
    count: ParameterCount = parameter_count(shape)
    stream = shape.tokens * shape.d_model
    matrix = shape.d_model * shape.d_ff
    layer = held.plus(
        weight_copies=copied(widths, count.linear - count.head), activations=2 * FP32 * stream
    )
    attention = layer.plus(
        weight_copies=-copied(widths, 3 * matrix + shape.d_model**2),
        activations=3 * widths.product * stream,
    )
    casts = widths.softmax != widths.product
    # Scores, their fp32 copy where autocast makes one, the result.
    softmax = (widths.product + widths.softmax * (2 if casts else 1)) * shape.scores
    # Scores, weights, their 16-bit copy, contiguous values, the result.
    per_score = widths.product + widths.softmax + (widths.product if casts else 0)
    product = per_score * shape.scores + 2 * widths.product * stream
    gate = FP32 * stream + 3 * widths.product * shape.tokens * shape.d_ff
    head = copied(widths, stream) + _logits(shape, widths)
    for name, parts in (
        ("softmax", attention.plus(activations=softmax)),
        ("weights times values", attention.plus(activations=product)),
        ("gate", layer.plus(weight_copies=-copied(widths, matrix), activations=gate)),
        ("head", layer.plus(weight_copies=copied(widths, count.head), activations=head)),
    ):
        yield Moment(phase="forward", name=name, parts=parts)
