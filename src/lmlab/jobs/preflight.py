"""Refuse points before measuring them if the device lacks what they ask for.

On a CPU for which PyTorch has no fast 16-bit matmul, it multiplies element by element, hundreds of
times slower than fp32: a study of minutes would take most of an hour. Such points end with a
reason, unless they are small. A refusal changes no number, so this module is in no fingerprint;
FLOP counters are imported by path at run time, or they would be in the fingerprint of every point.
A cold start is never probed: its first matmul is what it measures.
"""

import timeit
from collections.abc import Mapping
from functools import cache
from typing import Any

import torch

from lmlab import import_path
from lmlab.attention.support import why_unsupported
from lmlab.jobs.outcome import Unsupported
from lmlab.measure import precision
from lmlab.measure.precision import precision_named
from lmlab.study.config import OUR_MODEL
from lmlab.study.points import Point

NARROW_HEAD = 16
SLOW = 50  # slower than fp32 by this factor; a dtype with a fast matmul is within a small multiple
LONGEST_STEP_S = 0.5  # for a slow type: a point has some fifteen steps, a chapter dozens of points
PROBE = 256  # side of the square matmul that is timed: a fifth of a second where it is slow


def refuse_unsupported(point: Point, device: torch.device) -> None:
    """Raise `Unsupported`, with the reason, for a point that this device cannot measure."""
    asked = {**point.settings, **point.parameters}
    if "precision" in asked and (lacks := precision.why_unsupported(asked["precision"], device)):
        raise Unsupported(lacks)
    # Variants of one point are checked one by one, where they are measured.
    if "attention" in asked and "variants" not in asked:
        # Ranks choose their size at run time; every variant supports narrow heads.
        head_dim = asked["d_model"] // asked["num_heads"] if "num_heads" in asked else NARROW_HEAD
        dtype = precision_named(asked["precision"]).dtype
        reason = why_unsupported(asked["attention"], device=device, dtype=dtype, head_dim=head_dim)
        if reason:
            raise Unsupported(f"attention = {asked['attention']!r}: {reason}")
    if device.type == "cpu" and asked.get("start") != "cold":
        refuse_slow_type(asked)


def refuse_slow_type(asked: Mapping[str, Any]) -> None:
    """Raise `Unsupported` for a long step in a dtype that has no fast matmul on this CPU."""
    flops = flops_of_step(asked)
    dtype = precision_named(asked["precision"]).dtype if flops else torch.float32
    if dtype == torch.float32:
        return
    step_s = flops / (2 * PROBE**3) * product_s(dtype) / torch.get_num_threads()
    if step_s > LONGEST_STEP_S and product_s(dtype) > SLOW * product_s(torch.float32):
        raise Unsupported(
            f"{asked['precision']} has no fast matmul on this CPU: one takes over {SLOW} times "
            f"as long as in fp32, and a step would take over {LONGEST_STEP_S} s"
        )


def flops_of_step(asked: Mapping[str, Any]) -> float:
    """Matmul FLOPs of a step of our model, or of attention forward and backward.

    0 where unknown: a user's own model, ranks that choose their size, plain arithmetic.
    """
    if asked.get("model") == OUR_MODEL and "d_model" in asked:
        shape_class = import_path.resolve("lmlab.model.shape:ModelShape")
        shape = shape_class(**{key: asked[key] for key in shape_class.__dataclass_fields__})
        flops = import_path.resolve("lmlab.model.cost:flops")
        phases = flops(shape, mode=asked.get("mode", "train_step"))
        return sum(phase["matmul"] for phase in phases.values())
    if {"sequence", "head_dim"} <= set(asked):
        shape_of = import_path.resolve("lmlab.chapters.attention.measure.problem:shape_of")
        return float(shape_of(asked).flops()["both"])
    return 0


@cache
def product_s(dtype: torch.dtype) -> float:
    """Seconds of one square matmul, best of three. On a single thread: several would wait for other
    users of a core for many times as long as the matmul takes in fp32."""
    matrix, threads = torch.ones(PROBE, PROBE, dtype=dtype), torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return min(timeit.repeat(lambda: matrix @ matrix, repeat=3, number=1))
    finally:
        torch.set_num_threads(threads)
