"""What naive attention holds in memory, tensor by tensor, according to its formula.

softmax(Q K^T / sqrt(d)) V is a chain of operations that write their results to memory. Softmax saves
its result, the weights, for backward, and the second product needs them too; a mask is saved where
there is one; queries, keys and values exist anyway. So one tensor of batch x sequence x sequence
stays, whatever the head dimension. Forward peaks with two: each operation reads one and writes one.

Backward peaks while softmax is differentiated: weights, gradient of the weights, the product of
both (which PyTorch writes to memory on a GPU before it sums the rows) and gradient of the scores
exist at once, four such tensors.
"""

from __future__ import annotations

STAGES = ("forward_peak", "before_backward", "peak")
SCORES = ("scores", "weights", "gradient of weights", "weights × gradient", "gradient of scores")
INPUTS = ("queries", "keys", "values", "gradient of output")


def held(
    stage: str, *, batch: int, sequence: int, head_dim: int, itemsize: int, causal: bool
) -> dict[str, int]:
    """Bytes by tensor at one of the stages; without heads, or with them counted into the batch."""
    mask = ["mask"] if causal else []
    names = {
        "forward_peak": [*INPUTS, "scores", "weights", *mask, "output"],
        "before_backward": [*INPUTS, "weights", *mask, "output"],
        "peak": [*INPUTS, "weights", *mask, "output", *SCORES[2:], "gradient of values"],
    }[stage]
    sizes = dict.fromkeys(SCORES, batch * sequence * sequence * itemsize)
    sizes["mask"] = sequence * sequence
    vector = batch * sequence * head_dim * itemsize
    return {name: sizes.get(name, vector) for name in names}
