"""Bytes that autograd keeps from forward to backward, from the model's shape alone. No torch.

The functions list what each operation of this implementation saves; tests compare the sum byte for
byte with what autograd's hooks see. Attention scores grow with the square of the context.

Autocast halves only part of this. The residual stream and the norms stay in fp32. Every matmul
saves its own 16-bit copy of its input, even where three share one input (q, k, v), and of its
weight. On a GPU the softmax saves its result in fp32, and the next matmul a 16-bit copy of it; on a
CPU autocast runs the softmax in 16 bit.
"""

from dataclasses import dataclass
from typing import Literal

from lmlab.model.shape import ModelShape

Precision = Literal["fp32", "tf32", "bf16", "fp16"]
Device = Literal["cuda", "cpu"]

FP32 = 4


@dataclass(frozen=True, kw_only=True)
class Widths:
    """Bytes per number in the parts of the model that autocast treats differently."""

    matmul: int
    softmax: int
    weight_copy: int  # of autocast's copy of each weight; 0 without autocast

    @property
    def is_autocast(self) -> bool:
        return self.weight_copy > 0

    @property
    def scores_cast(self) -> int:
        """Bytes per score of the 16-bit copy cast for the matmul after the softmax, or 0."""
        return self.matmul if self.softmax != self.matmul else 0


def widths_of(precision: Precision, device: Device) -> Widths:
    if precision in ("fp32", "tf32"):
        return Widths(matmul=FP32, softmax=FP32, weight_copy=0)
    return Widths(matmul=2, softmax=FP32 if device == "cuda" else 2, weight_copy=2)


def saved_activations(shape: ModelShape, precision: Precision, *, device: Device = "cuda") -> int:
    """Bytes saved in one forward pass, excluding parameters, their copies and the batch."""
    widths = widths_of(precision, device)
    return shape.num_layers * saved_block(shape, widths) + saved_head(shape, widths)


def saved_block(shape: ModelShape, widths: Widths) -> int:
    """Bytes saved by one block: attention and feed-forward."""
    stream = widths.matmul * shape.tokens * shape.d_model
    # Without autocast q, k, v share one input; with it, each matmul casts its own copy.
    inputs = stream * (3 if widths.is_autocast else 1)
    rope_tables = 2 * widths.matmul * shape.context * shape.head_dim if widths.is_autocast else 0
    mask = shape.context * shape.context
    # The result of the softmax, which the next matmul saves too: one tensor if the dtypes agree.
    scores = (widths.softmax + widths.scores_cast) * shape.scores
    q_k_v_and_output = 4 * stream
    attention = _saved_norm(shape) + inputs + rope_tables + mask + scores + q_k_v_and_output
    return attention + saved_feed_forward(shape, widths)


def saved_feed_forward(shape: ModelShape, widths: Widths) -> int:
    inputs = widths.matmul * shape.tokens * shape.d_model * (2 if widths.is_autocast else 1)
    # w1 x for silu, silu(w1 x) and w3 x for their product, and the product for w2.
    hidden = 4 * widths.matmul * shape.tokens * shape.d_ff
    return _saved_norm(shape) + inputs + hidden


def saved_head(shape: ModelShape, widths: Widths) -> int:
    """Bytes saved by final norm, head and loss, which saves each row's maximum and sum."""
    inputs = widths.matmul * shape.tokens * shape.d_model
    row_statistics = 2 * FP32 * shape.tokens
    return _saved_norm(shape) + inputs + logits_bytes(shape, widths) + row_statistics


def logits_bytes(shape: ModelShape, widths: Widths) -> int:
    return widths.matmul * shape.tokens * shape.vocab_size


def _saved_norm(shape: ModelShape) -> int:
    """The norm's input, its normalized value before the weight, and 1/rms of each row."""
    return FP32 * shape.tokens * (2 * shape.d_model + 1)
