"""FLOPs and memory traffic of the parts of naive attention. No torch.

Softmax takes five operations per score (maximum, subtract, exp, sum, divide): 5 B H T^2 in all,
against 2 B H T^2 d for each of the two matmuls around it. That is 2 d / 5 times less arithmetic (26
times at d = 64), yet its operators read and write the whole T x T tensor, and time follows bytes.

Bytes are the minimum for an operator running by itself: every operand read once, every result
written once. The mask is shared by all heads and counted once.
"""

from dataclasses import dataclass

from lmlab.model.shape import ModelShape

SOFTMAX_FLOPS_PER_SCORE = 5
"""Maximum, subtract, exp, sum, divide."""
SCALE_FLOPS_PER_SCORE = 1
MASK_ELEMENT_BYTES = 1


@dataclass(frozen=True, kw_only=True)
class PartCost:
    """One part of attention in a forward pass, all layers together."""

    flops: int
    bytes: int


def attention_parts(shape: ModelShape, *, element_bytes: int) -> dict[str, PartCost]:
    """The parts of naive attention in a forward pass with tensors of one dtype."""
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
    """The mask is filled, made triangular (read and written), and read."""
    return 4 * shape.context**2 * MASK_ELEMENT_BYTES
