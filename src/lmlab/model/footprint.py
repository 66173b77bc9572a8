"""What the model should occupy in memory, from its shape alone. No torch.

Training memory has two halves. One is there between steps and depends on the parameters alone: 4
bytes each for weight and gradient, 8 for AdamW's two moments. The other lives from forward to
backward: everything autograd keeps because a derivative needs it. `saved_activations` lists that
operation by operation, as this implementation really saves it (tests compare it byte for byte with
what autograd's hooks see). Scores grow with the square of the context: in a small GPT at context
1024 they are more than a third of it already, which is why fused attention saves so much.

Autocast halves only part of it. The stream and the norms stay in fp32; every product saves its
own 16-bit copy of its input, even where three share one (q, k, v), and of its weight; and on a GPU
the softmax saves fp32 and the product after it a 16-bit copy besides. (On a CPU autocast leaves
softmax in 16 bit.)

The peak is the largest of a few moments at which memory is known to be highest; between two layers
everything changes evenly, so only the first and the last one count. It speaks of tensors: what the
allocator rounds and what a library keeps for itself (tens of MiB for cuBLAS) come on top.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

from lmlab.model.cost import Mode, ParameterCount, check_name, parameter_count
from lmlab.model.shape import ModelShape

Precision = Literal["fp32", "tf32", "bf16", "fp16"]
Device = Literal["cuda", "cpu"]

FP32 = 4
TOKEN_ID = 8


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """Bytes of one step by what they are for; `peak` is the most that exists at one time."""

    parameters: int
    buffers: int
    inputs: int
    gradients: int
    optimizer_state: int
    activations: int
    """Kept by autograd from forward to backward, 16-bit weight copies not included."""
    autocast_weights: int
    """16-bit copies that autocast makes of the weights, once a step."""
    peak: int


@dataclass(frozen=True, kw_only=True)
class _Widths:
    """Bytes of one number in the parts of the model that autocast treats differently."""

    product: int
    softmax: int
    is_autocast: bool


def _widths(precision: Precision, device: Device) -> _Widths:
    if precision in ("fp32", "tf32"):
        return _Widths(product=FP32, softmax=FP32, is_autocast=False)
    return _Widths(product=2, softmax=FP32 if device == "cuda" else 2, is_autocast=True)


def memory(
    shape: ModelShape, precision: Precision, mode: Mode, *, device: Device = "cuda"
) -> Footprint:
    """Bytes of one step of the model with naive attention, fp32 weights and AdamW."""
    check_name("precision", precision, get_args(Precision))
    check_name("mode", mode, get_args(Mode))
    check_name("device", device, get_args(Device))
    widths = _widths(precision, device)
    count = parameter_count(shape)
    trains = mode != "forward"
    return Footprint(
        parameters=FP32 * count.total,
        buffers=2 * FP32 * shape.context * shape.head_dim,
        inputs=(2 if trains else 1) * TOKEN_ID * shape.tokens,
        gradients=FP32 * count.total if trains else 0,
        optimizer_state=2 * FP32 * count.total if mode == "train_step" else 0,
        activations=saved_activations(shape, precision, device=device) if trains else 0,
        autocast_weights=widths.product * count.linear if widths.is_autocast else 0,
        peak=_peak(shape, widths, mode),
    )


def saved_activations(shape: ModelShape, precision: Precision, *, device: Device = "cuda") -> int:
    """Bytes autograd keeps from forward to backward, without parameters, their copies, inputs."""
    widths = _widths(precision, device)
    layer = _saved_attention(shape, widths) + _saved_feed_forward(shape, widths)
    return shape.num_layers * layer + _saved_head(shape, widths)


def _saved_norm(shape: ModelShape) -> int:
    """The norm's input, its normalised value before the weight, and 1/rms of each row."""
    return FP32 * shape.tokens * (2 * shape.d_model + 1)


def _saved_attention(shape: ModelShape, widths: _Widths) -> int:
    stream = shape.tokens * shape.d_model
    # Without autocast q, k, v share one input; with it, each product casts its own copy.
    inputs = widths.product * stream * (3 if widths.is_autocast else 1)
    rope_tables = 2 * widths.product * shape.context * shape.head_dim if widths.is_autocast else 0
    heads = 3 * widths.product * stream
    mask = shape.context * shape.context
    # The softmax keeps its result, and the product after it its operand: one tensor if the
    # types agree.
    score = widths.softmax + (widths.product if widths.softmax != widths.product else 0)
    mixed = widths.product * stream
    return _saved_norm(shape) + inputs + rope_tables + heads + mask + score * shape.scores + mixed


def _saved_feed_forward(shape: ModelShape, widths: _Widths) -> int:
    inputs = widths.product * shape.tokens * shape.d_model * (2 if widths.is_autocast else 1)
    # w1 x for silu, silu(w1 x) and w3 x for their product, and the product for w2.
    hidden = 4 * widths.product * shape.tokens * shape.d_ff
    return _saved_norm(shape) + inputs + hidden


def _saved_head(shape: ModelShape, widths: _Widths) -> int:
    inputs = widths.product * shape.tokens * shape.d_model
    # The loss keeps each row's maximum and sum of exponentials.
    row_statistics = 2 * FP32 * shape.tokens
    return _saved_norm(shape) + inputs + _logits(shape, widths) + row_statistics


def _logits(shape: ModelShape, widths: _Widths) -> int:
    return widths.product * shape.tokens * shape.vocab_size


def _peak(shape: ModelShape, widths: _Widths, mode: Mode) -> int:
    """The largest of the moments at which memory can be highest."""
    count = parameter_count(shape)
    held = FP32 * count.total + 2 * FP32 * shape.context * shape.head_dim
    held += (1 if mode == "forward" else 2) * TOKEN_ID * shape.tokens
    if mode == "forward":
        return held + max(_inference_moments(shape, widths, count))
    if mode == "train_step":
        held += 2 * FP32 * count.total
    moments = max(_training_moments(shape, widths, count))
    if mode == "train_step":
        # The optimizer's one temporary is as large as the largest parameter.
        largest = shape.d_model * max(shape.vocab_size, shape.d_ff, shape.d_model)
        moments = max(moments, FP32 * (count.total + largest))
    return held + moments


def _inference_moments(shape: ModelShape, widths: _Widths, count: ParameterCount) -> Iterator[int]:
    """Without gradients a tensor lives as long as a name holds it: the last layer, then the head.

    Autocast's weight copies pile up all the way, so an earlier layer is never higher.
    """
    copy = widths.product if widths.is_autocast else 0
    stream = shape.tokens * shape.d_model
    w2 = shape.d_model * shape.d_ff
    residual_and_norm = 2 * FP32 * stream
    layer = copy * (count.linear - count.head) + residual_and_norm

    attention = layer - copy * (3 * w2 + shape.d_model**2) + 3 * widths.product * stream
    # Softmax: scores, their fp32 copy where autocast makes one, the result.
    casts = widths.softmax != widths.product
    yield attention + (widths.product + widths.softmax * (2 if casts else 1)) * shape.scores
    # Second product: scores, weights, their 16-bit copy, contiguous values, the result.
    per_score = widths.product + widths.softmax + (widths.product if casts else 0)
    yield attention + per_score * shape.scores + 2 * widths.product * stream
    # Gate: silu(w1 x), w3 x and their product; the layer's own input is still held by its caller.
    gate = 3 * widths.product * shape.tokens * shape.d_ff
    yield layer - copy * w2 + FP32 * stream + gate
    # Head: its input's 16-bit copy and the logits.
    yield layer + copy * (count.head + stream) + _logits(shape, widths)


def _training_moments(shape: ModelShape, widths: _Widths, count: ParameterCount) -> Iterator[int]:
    """Backward gives saved tensors back layer by layer while gradients take their place."""
    copy = widths.product if widths.is_autocast else 0
    layers = shape.num_layers
    head = _saved_head(shape, widths)
    layer = _saved_attention(shape, widths) + _saved_feed_forward(shape, widths)
    everything = layers * layer + head + copy * count.linear

    # Loss: the fp32 gradient of the logits, and its 16-bit copy.
    yield everything + (FP32 + copy) * shape.tokens * shape.vocab_size
    # Head: the logits are gone, their gradient and the head's are there.
    yield everything + (FP32 + copy) * count.head

    layer_parameters = (count.attention + count.feed_forward) // layers
    before_layers = everything - head - copy * count.head + FP32 * count.head
    for layers_done in {0, layers - 1}:
        change = FP32 * layer_parameters - layer - copy * layer_parameters
        yield from _layer_moments(shape, widths, before_layers + layers_done * change)

    yield FP32 * (count.total + shape.tokens * shape.d_model)


def _layer_moments(shape: ModelShape, widths: _Widths, held: int) -> Iterator[int]:
    """The two heights within one layer's backward pass, feed-forward first."""
    copy = widths.product if widths.is_autocast else 0
    gradient = FP32 * shape.tokens * shape.d_model
    weight = shape.d_model * shape.d_ff
    # Gate: gradients of the product and both factors; w2 is done and its input given back.
    gate = 2 * widths.product * shape.tokens * shape.d_ff
    yield held + gradient + (FP32 - copy) * weight + gate
    held += 3 * (FP32 - copy) * weight - _saved_feed_forward(shape, widths)
    # Softmax: gradients of its result and its input; the product's 16-bit operand is given back.
    casts = widths.softmax != widths.product
    per_score = 2 * widths.softmax - (widths.product if casts else 0)
    yield held + gradient + (FP32 - copy) * shape.d_model**2 + per_score * shape.scores
