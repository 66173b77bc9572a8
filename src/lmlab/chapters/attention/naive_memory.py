"""Memory of naive attention, tensor by tensor, predicted from its formula.

softmax(Q K^T / sqrt(d)) V writes the result of every operation to memory. Softmax saves its output,
the weights, which the second matmul needs too, so one tensor of batch x sequence x sequence is kept
for backward (plus the mask, if any). Forward peaks at two: each operation reads one and writes one.
Backward peaks at four, inside softmax: weights, their gradient, the product of both (which PyTorch
writes to memory on a GPU before summing its rows) and the gradient of the scores.
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
    """Yield (stage, tensor, bytes) for attention without heads; `sum` is the total of a stage."""
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
