"""What naive attention holds in memory, tensor by tensor, according to its formula.

softmax(Q K^T / sqrt(d)) V writes the result of every operation to memory. Softmax saves its result,
the weights, which the second product needs too, and so one tensor of batch x sequence x sequence
stays (and the mask, if any). Forward peaks with two: each operation reads one and writes one.
Backward peaks while softmax is differentiated: weights, gradient of the weights, the product of
both (which PyTorch writes to memory on a GPU before it sums the rows) and gradient of the scores.
"""

from collections.abc import Iterator, Mapping
from typing import Any

SCORES = ("scores", "weights", "gradient of weights", "weights × gradient", "gradient of scores")
INPUTS = ("queries", "keys", "values", "gradient of output")
STAGES = {
    "forward_peak": (*INPUTS, "scores", "weights", "mask", "output"),
    "before_backward": (*INPUTS, "weights", "mask", "output"),
    "peak": (*INPUTS, "weights", "mask", "output", *SCORES[2:], "gradient of values"),
}
ITEMSIZE = {"fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2}


def account(point: Mapping[Any, Any]) -> Iterator[tuple[str, str, int]]:
    """(stage, tensor, bytes) of attention without heads, with the sum of each stage as a tensor."""
    batch, sequence, itemsize = point["batch"], point["sequence"], ITEMSIZE[point["precision"]]
    sizes = dict.fromkeys(SCORES, batch * sequence * sequence * itemsize)
    sizes["mask"] = sequence * sequence
    vectors = batch * sequence * point["head_dim"] * itemsize
    for stage, tensors in STAGES.items():
        held = {name: sizes.get(name, vectors) for name in tensors}
        if not point["causal"]:
            del held["mask"]
        yield from ((stage, name, count) for name, count in held.items())
        yield stage, "sum", sum(held.values())
