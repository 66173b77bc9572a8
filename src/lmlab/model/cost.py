"""What the model should cost in parameters and arithmetic, from its shape alone. No torch.

Two kinds of FLOPs are kept apart because a GPU has two engines for them. Products run on tensor
cores at hundreds of TFLOP/s and nearly all FLOPs are theirs; the rest (softmax, norms, activation,
rotation, optimizer) is little arithmetic on much memory, so its time goes by bytes and not by
FLOPs. A share of the peak is taken from the products alone.

Products: a matrix (m, k) times (k, n) is 2 m n k, a multiply and an add. Backward multiplies twice
for each forward product, once for each operand's gradient, hence exactly double.

The causal convention is a name that travels with the number. "full" counts what the naive
attention really computes, the whole square of scores. "causal" counts the half that the mask keeps
(S^2 / 2, the diagonal's share neglected, as attention benchmarks do): what a fused kernel needs.

The rest is counted by one rule: each add, subtract, multiply, divide, maximum, exponential,
logarithm or root of one number is one. Copies, casts, comparisons and masking are none. `REST`
spells the count out operation by operation, as this implementation and its autograd do it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

from lmlab.model.shape import ModelShape

Convention = Literal["full", "causal"]
Mode = Literal["forward", "forward_backward", "train_step"]

OPTIMIZER_FLOPS_PER_PARAMETER = 13
"""AdamW: both moments 3 + 4, decay 1, denominator 2, update 3."""


@dataclass(frozen=True, kw_only=True)
class ParameterCount:
    """Parameters of the model, part by part, all layers together."""

    embedding: int
    attention: int
    feed_forward: int
    norms: int
    head: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.embedding + self.linear + self.norms

    @property
    def non_embedding(self) -> int:
        """All but the token embedding, which is looked up and not multiplied."""
        return self.total - self.embedding

    @property
    def linear(self) -> int:
        """Those that take part in products; autocast makes a 16-bit copy of these."""
        return self.attention + self.feed_forward + self.head


def parameter_count(shape: ModelShape) -> ParameterCount:
    """Parameters of the model of this shape; batch and context have no part in it."""
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
    """Arithmetic outside the products: FLOPs for each element, forward and backward."""

    name: str
    elements: Callable[[ModelShape], int]
    forward: int
    backward: int
    on_scores: bool = False
    """Whether its elements are query-key pairs, of which the causal convention counts half."""
    in_loss: bool = False
    """Whether it belongs to the loss, which a forward pass for its logits alone leaves out."""


REST: tuple[Operation, ...] = (
    # Scale by 1/sqrt(d). Backward the same.
    Operation("scale", lambda s: s.num_layers * s.scores, 1, 1, on_scores=True),
    # Maximum, subtract, exp, sum, divide. Backward y * (g - sum(g * y)).
    Operation("softmax", lambda s: s.num_layers * s.scores, 5, 4, on_scores=True),
    # x * cos + swap(x) * sin over queries and keys. Backward the same with the gradient.
    Operation("rope", lambda s: 2 * s.num_layers * s.tokens * s.d_model, 3, 3),
    # Square, sum, times 1/rms, times weight. Backward: two for the gradient of each factor's
    # product and its sum (weight, 1/rms), one for each factor passed on, mean, square 2, joining.
    Operation("norm", lambda s: _norms(s) * s.tokens * s.d_model, 4, 10),
    # Divide by d, add eps, root. Backward: -1/2 r^3 times the gradient.
    Operation("norm rows", lambda s: _norms(s) * s.tokens, 3, 4),
    # x / (1 + exp(-x)) and the gate's product. Backward: s * (1 + x * (1 - s)) of a fresh sigmoid,
    # times the gradient, and both factors' gradients.
    Operation("silu gate", lambda s: s.num_layers * s.tokens * s.d_ff, 5, 11),
    # One add a branch. Backward: the gradients of stream and branch are joined.
    Operation("residual", lambda s: 2 * s.num_layers * s.tokens * s.d_model, 1, 1),
    # The gradients of q, k, v and of w1, w3 are summed on their shared input.
    Operation("shared inputs", lambda s: s.num_layers * s.tokens * s.d_model, 0, 3),
    # A lookup. Backward: each token's gradient is added to its row.
    Operation("embedding", lambda s: s.tokens * s.d_model, 0, 1),
    # Maximum, subtract, exp, sum. Backward: subtract, exp, scale.
    Operation("loss", lambda s: s.tokens * s.vocab_size, 4, 3, in_loss=True),
    # Logarithm, target's logit minus maximum, their difference, mean. Backward: the row's scale,
    # and the one subtracted at the target.
    Operation("loss rows", lambda s: s.tokens, 4, 2, in_loss=True),
)


def flops(
    shape: ModelShape, *, mode: Mode = "train_step", convention: Convention = "full"
) -> dict[str, dict[str, int]]:
    """FLOPs of one step, {phase: {"matmul": n, "other": n}}, for the phases that the mode has.

    The loss is part of the forward phase, except in mode "forward", which stops at the logits.
    """
    check_name("mode", mode, get_args(Mode))
    check_name("convention", convention, get_args(Convention))
    forward_matmul = _matmul_forward(shape, convention)
    with_loss = mode != "forward"
    rest = [(op, _elements(op, shape, convention)) for op in REST if with_loss or not op.in_loss]
    phases = {
        "forward": {
            "matmul": forward_matmul,
            "other": sum(op.forward * elements for op, elements in rest),
        }
    }
    if mode != "forward":
        phases["backward"] = {
            "matmul": 2 * forward_matmul,
            "other": sum(op.backward * elements for op, elements in rest),
        }
    if mode == "train_step":
        optimizer = OPTIMIZER_FLOPS_PER_PARAMETER * parameter_count(shape).total
        phases["optimizer"] = {"matmul": 0, "other": optimizer}
    return phases


def check_name(key: str, value: str, allowed: tuple[str, ...]) -> None:
    """A ValueError of one line if the value is not among those allowed."""
    if value not in allowed:
        raise ValueError(f"{key}: {value!r} is not known; allowed are {', '.join(allowed)}")


def _matmul_forward(shape: ModelShape, convention: Convention) -> int:
    """FLOPs of one forward pass's products: every weight meets every token; QK^T and PV."""
    projections = 2 * shape.tokens * parameter_count(shape).linear
    attention = 4 * shape.num_layers * shape.scores * shape.head_dim
    return projections + (attention if convention == "full" else attention // 2)


def _elements(operation: Operation, shape: ModelShape, convention: Convention) -> int:
    """Numbers that an operation works on; an odd square's half is rounded down."""
    elements = operation.elements(shape)
    return elements // 2 if operation.on_scores and convention == "causal" else elements


def _norms(shape: ModelShape) -> int:
    """Normalisations in one pass: two a layer and the final one."""
    return 2 * shape.num_layers + 1
