"""The operations of naive attention one by one, with the softmax fused and written out.

What softmax costs next to the matmuls depends on how it is written. PyTorch's reads the scores once
and writes the weights once. Written out, it is five operations over tensors of sequence x sequence
(max, subtract, exp, sum, divide), each a kernel with its own trip through memory. Both are checked
to give the same weights. Every operation is a variant, interleaved with the others and timed by
CUDA events with a cold L2; in a model, scores that fit in the cache are read faster than here.

Records: `time` per part, `flops` per phase.
"""

import torch

from lmlab.attention.naive import future_mask
from lmlab.attention.unfused import softmax
from lmlab.chapters.attention.measure.problem import TOLERANCE, Problem, shape_of
from lmlab.chapters.attention.measure.rounds import flop_records, sample_in_turns, sampling_budget
from lmlab.chapters.attention.measure.variants import Variants, WrongNumbers
from lmlab.jobs.outcome import Outcome
from lmlab.measure.clock import collector_paused
from lmlab.measure.kernel_clock import Call
from lmlab.measure.precision import tf32_allowed
from lmlab.study.points import Point


def measure(point: Point, device: torch.device) -> Outcome:
    """Time every operation at one shape."""
    asked = {**point.settings, **point.parameters}
    shape = shape_of(asked)
    with tf32_allowed(shape.tf32), torch.no_grad(), collector_paused():
        problem = Problem(shape, device, asked["seed"])
        calls = operations(problem)
        variants = Variants({name: {"part": name} for name in calls}, device)
        prepared = {name: (lambda call=call: call) for name, call in calls.items()}
        sample_in_turns(variants, prepared, sampling_budget(asked))
    return variants.outcome(*flop_records(problem))


def operations(problem: Problem) -> dict[str, Call]:
    """One call per operation, with its inputs precomputed."""
    q, k, v = problem.inputs
    scale = q.shape[-1] ** -0.5
    products = q @ k.transpose(-2, -1)
    scores = (products * scale).masked_fill(future_mask(q, k), float("-inf"))
    largest = scores.amax(-1, keepdim=True)
    shifted = scores - largest
    exponentials = shifted.exp()
    sums = exponentials.sum(-1, keepdim=True)
    weights = exponentials / sums
    for other in (softmax(scores), torch.softmax(scores, -1)):
        if not torch.allclose(weights, other, atol=TOLERANCE[weights.dtype]):
            raise WrongNumbers("softmax written out differs from the fused one")
    return {
        "scores": lambda: q @ k.transpose(-2, -1),
        "scale and mask": lambda: (products * scale).masked_fill(future_mask(q, k), float("-inf")),
        "softmax": lambda: torch.softmax(scores, -1),
        "max": lambda: scores.amax(-1, keepdim=True),
        "subtract": lambda: scores - largest,
        "exp": shifted.exp,
        "sum": lambda: exponentials.sum(-1, keepdim=True),
        "divide": lambda: exponentials / sums,
        "output": lambda: weights @ v,
    }
