"""What the parts of naive attention cost in arithmetic and in memory traffic. No torch.

Softmax is where intuition fails. It does five operations on each score (maximum, subtract, exp,
sum, divide) and there are batch x heads x T x T scores: 5 B H T^2 in all, against 2 B H T^2 d for
each of the two products around it. That is d / 2.5 times less arithmetic (26 times at d = 64), yet
each of its operators reads and writes the whole T x T tensor. Time follows the bytes.

Bytes are the least that an operator running by itself must move: every operand once from memory and
every result once to it. A cache can save some of it, a poor kernel can move more; the mask is
shared by all heads and counted once.
"""

from dataclasses import dataclass

from lmlab.model.shape import ModelShape

SOFTMAX_FLOPS_PER_SCORE = 5
"""Maximum, subtract, exp, sum, divide."""
SCALE_FLOPS_PER_SCORE = 1
MASK_ELEMENT_BYTES = 1


@dataclass(frozen=True, kw_only=True)
class PartCost:
    """One part of attention in one forward pass, all layers together."""

    flops: int
    bytes: int


def attention_parts(shape: ModelShape, *, element_bytes: int) -> dict[str, PartCost]:
    """The parts of naive attention in a forward pass in which all tensors have one type."""
    layers, scores = shape.num_layers, shape.scores
    score_bytes = scores * element_bytes
    head_bytes = shape.tokens * shape.d_model * element_bytes  # one of Q, K, V or the output
    product = PartCost(
        flops=layers * 2 * scores * shape.head_dim,
        bytes=layers * (2 * head_bytes + score_bytes),
    )
    return {
        "scores": product,
        "scale_and_mask": PartCost(
            flops=layers * SCALE_FLOPS_PER_SCORE * scores,
            # Scaling and masking each read and write all scores.
            bytes=layers * (4 * score_bytes + _mask_bytes(shape)),
        ),
        "softmax": PartCost(
            flops=layers * SOFTMAX_FLOPS_PER_SCORE * scores, bytes=layers * 2 * score_bytes
        ),
        "output": product,
    }


def _mask_bytes(shape: ModelShape) -> int:
    """The mask is filled, its triangle is cut (read and written), and it is read."""
    return 4 * shape.context**2 * MASK_ELEMENT_BYTES
