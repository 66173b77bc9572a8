"""Predicted parameters and FLOPs of the model, from its shape alone. No torch.

Matmul FLOPs are counted separately: they run on tensor cores and are nearly all of the arithmetic;
the rest is bound by memory bandwidth. Utilization (MFU) is computed from matmuls alone. A matmul
(m, k) x (k, n) is 2 m n k FLOPs, and backward has two matmuls for each one in forward.

The convention for causal attention is stated with every number. "full" counts what naive attention
computes, the whole S x S square of scores. "causal" counts the half that the mask keeps (S^2 / 2,
as attention benchmarks do), which is all a fused kernel has to compute.

Everything else is counted by one rule: each add, subtract, multiply, divide, maximum, exponential,
logarithm or root of one number is one FLOP; copies, casts, comparisons and masking count as zero.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

from lmlab.model.shape import ModelShape

Convention = Literal["full", "causal"]
Mode = Literal["forward", "forward_backward", "train_step"]

OPTIMIZER_FLOPS_PER_PARAMETER = 13  # AdamW: both moments 3 + 4, decay 1, denominator 2, update 3


@dataclass(frozen=True, kw_only=True)
class ParameterCount:
    """Parameters by part of the model, summed over layers."""

    embedding: int
    attention: int
    feed_forward: int
    norms: int
    head: int

    @property
    def total(self) -> int:
        return self.embedding + self.linear + self.norms

    @property
    def non_embedding(self) -> int:
        """Without the token embedding, which takes part in no matmul."""
        return self.total - self.embedding

    @property
    def linear(self) -> int:
        """Weights of matmuls, of which autocast makes 16-bit copies."""
        return self.attention + self.feed_forward + self.head


def parameter_count(shape: ModelShape) -> ParameterCount:
    """Parameters of the model; independent of batch and context."""
    d_model, layers = shape.d_model, shape.num_layers
    return ParameterCount(
        embedding=shape.vocab_size * d_model,
        attention=layers * 4 * d_model * d_model,
        feed_forward=layers * 3 * d_model * shape.d_ff,
        norms=(2 * layers + 1) * d_model,
        head=shape.vocab_size * d_model,
    )


@dataclass(frozen=True)
class Operation:
    """Arithmetic outside matmuls: FLOPs per element, forward and backward."""

    name: str
    elements: Callable[[ModelShape], int]
    forward: int
    backward: int
    on_scores: bool = False
    """Whether elements are query-key pairs, of which the causal convention counts half."""
    in_loss: bool = False  # part of the loss, which mode "forward" leaves out


NON_MATMUL: tuple[Operation, ...] = (
    # Scale by 1/sqrt(d). Same in backward.
    Operation("scale", lambda s: s.num_layers * s.scores, 1, 1, on_scores=True),
    # Maximum, subtract, exp, sum, divide. Backward y * (g - sum(g * y)).
    Operation("softmax", lambda s: s.num_layers * s.scores, 5, 4, on_scores=True),
    # x * cos + swap(x) * sin over queries and keys. Same in backward, with the gradient.
    Operation("rope", lambda s: 2 * s.num_layers * s.tokens * s.d_model, 3, 3),
    # Square, sum, times 1/rms, times weight. Backward: product and sum for the gradients of weight
    # and 1/rms (4), products with both (2), mean (1), square (2), sum of both paths (1).
    Operation("norm", lambda s: _norms(s) * s.tokens * s.d_model, 4, 10),
    # Divide by d, add eps, root. Backward: -1/2 r^3 times the gradient.
    Operation("norm rows", lambda s: _norms(s) * s.tokens, 3, 4),
    # x / (1 + exp(-x)) and the gate's product. Backward: s * (1 + x * (1 - s)) with s recomputed,
    # times the gradient, and the gradients of both factors.
    Operation("silu gate", lambda s: s.num_layers * s.tokens * s.d_ff, 5, 11),
    # One add per branch. Backward: the gradients of stream and branch are added.
    Operation("residual", lambda s: 2 * s.num_layers * s.tokens * s.d_model, 1, 1),
    # The gradients of q, k, v and of w1, w3 are summed for their shared input.
    Operation("shared inputs", lambda s: s.num_layers * s.tokens * s.d_model, 0, 3),
    # A lookup. Backward: each token's gradient is added to its row.
    Operation("embedding", lambda s: s.tokens * s.d_model, 0, 1),
    # Maximum, subtract, exp, sum. Backward: subtract, exp, scale.
    Operation("loss", lambda s: s.tokens * s.vocab_size, 4, 3, in_loss=True),
    # Logarithm, target's logit minus maximum, their difference, mean. Backward: the row's scale,
    # and 1 subtracted at the target.
    Operation("loss rows", lambda s: s.tokens, 4, 2, in_loss=True),
)


def flops(
    shape: ModelShape, *, mode: Mode = "train_step", convention: Convention = "full"
) -> dict[str, dict[str, int]]:
    """FLOPs of one step as {phase: {"matmul": n, "other": n}}, for the phases of the mode.

    The loss is part of the forward phase, except in mode "forward", which ends with the logits.
    """
    check_choice("mode", mode, get_args(Mode))
    check_choice("convention", convention, get_args(Convention))
    # All weights with all tokens, QK^T and PV.
    forward_matmul = 2 * shape.tokens * parameter_count(shape).linear
    attention = 4 * shape.num_layers * shape.scores * shape.head_dim
    forward_matmul += attention if convention == "full" else attention // 2
    rest = [
        (op, op.elements(shape) // (2 if op.on_scores and convention == "causal" else 1))
        for op in NON_MATMUL
        if mode != "forward" or not op.in_loss
    ]
    other = sum(op.forward * elements for op, elements in rest)
    phases = {"forward": {"matmul": forward_matmul, "other": other}}
    if mode != "forward":
        other = sum(op.backward * elements for op, elements in rest)
        phases["backward"] = {"matmul": 2 * forward_matmul, "other": other}
    if mode == "train_step":
        optimizer = OPTIMIZER_FLOPS_PER_PARAMETER * parameter_count(shape).total
        phases["optimizer"] = {"matmul": 0, "other": optimizer}
    return phases


def check_choice(key: str, value: str, allowed: tuple[str, ...]) -> None:
    """Raise ValueError if the value is not one of those allowed."""
    if value not in allowed:
        raise ValueError(f"{key} must be one of {', '.join(allowed)}, got {value!r}")


def _norms(shape: ModelShape) -> int:
    """Number of norms: two per layer and the final one."""
    return 2 * shape.num_layers + 1


@dataclass(frozen=True, kw_only=True)
class PartCost:
    """Forward cost of one part of attention, summed over layers."""

    flops: int
    bytes: int


def attention_parts(shape: ModelShape, *, element_bytes: int) -> dict[str, PartCost]:
    """Forward cost of each part of naive attention, with all tensors in one dtype.

    The softmax does 2 d / 5 times less arithmetic than either matmul (26 times at d = 64), yet it
    reads and writes the whole T x T tensor, and time follows bytes. Bytes are the minimum for an
    unfused operator: every operand read once, every result written once. The mask is shared by all
    heads and counted once.
    """
    layers, scores = shape.num_layers, shape.scores
    per_score = {operation.name: operation.forward for operation in NON_MATMUL}
    score_bytes = scores * element_bytes
    head_bytes = shape.tokens * shape.d_model * element_bytes  # one of Q, K, V or the output
    product = PartCost(
        flops=layers * 2 * scores * shape.head_dim,
        bytes=layers * (2 * head_bytes + score_bytes),
    )
    # One byte each; filled, made triangular (read and written), and read.
    mask_bytes = 4 * shape.context**2
    return {
        "scores": product,
        "scale_and_mask": PartCost(
            flops=layers * per_score["scale"] * scores,
            # Scaling and masking each read and write all scores.
            bytes=layers * (4 * score_bytes + mask_bytes),
        ),
        "softmax": PartCost(
            flops=layers * per_score["softmax"] * scores, bytes=layers * 2 * score_bytes
        ),
        "output": product,
    }
