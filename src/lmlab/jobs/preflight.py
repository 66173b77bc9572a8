"""What is refused before it is measured: what a device does not have, or only in name.

Where PyTorch has no fast products of a half type for a CPU it still multiplies them, number by
number: hundreds of times slower than fp32, so that a study of minutes takes most of an hour, and
its numbers say nothing that the first of them did not. Such points end with a reason, unless they
are small.

A refusal moves no number, and a cold start, whose first product is what it measures, is not asked.
So this module counts in no fingerprint, and what counts operations is imported by name: else it
would be in the closure of every point.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import cache
from typing import Any

import torch

from lmlab import import_path
from lmlab.attention.support import why_unsupported
from lmlab.jobs.outcome import Unsupported
from lmlab.measure.precision import precision_named
from lmlab.study.config import OUR_MODEL
from lmlab.study.points import Point

NARROW_HEAD = 16
SLOW = 50
"""Times as long as in fp32. A type with fast products takes a few times at most."""
LONGEST_STEP_S = 0.5
"""Of a slow type: a point has some fifteen steps, and a chapter dozens of points."""
PROBE = 256
"""Rows and columns of the product that is timed: a fifth of a second where it is slow."""
MODEL_SHAPE = "lmlab.model.shape:ModelShape"
MODEL_FLOPS = "lmlab.model.cost:flops"
ATTENTION_SHAPE = "lmlab.chapters.attention.measure.problem:shape_of"


def refuse_unsupported(point: Point, device: torch.device) -> None:
    """Raise `Unsupported` for a point that is not measured on this device, with the reason."""
    asked = {**point.settings, **point.parameters}
    refuse_unsupported_attention(asked, device)
    if device.type == "cpu" and asked.get("start") != "cold":
        refuse_slow_type(asked)


def refuse_unsupported_attention(asked: Mapping[str, Any], device: torch.device) -> None:
    """Raise `Unsupported` for a model whose attention is not measured on this device.

    Where a point compares variants, each has a status of its own.
    """
    if "attention" not in asked or "variants" in asked:
        return
    # Ranks choose the size themselves, from what fits; narrow heads fit every variant.
    head_dim = asked["d_model"] // asked["num_heads"] if "num_heads" in asked else NARROW_HEAD
    dtype = precision_named(asked["precision"]).dtype
    reason = why_unsupported(asked["attention"], device=device, dtype=dtype, head_dim=head_dim)
    if reason:
        raise Unsupported(f"attention = {asked['attention']!r}: {reason}")


def refuse_slow_type(asked: Mapping[str, Any]) -> None:
    """Raise `Unsupported` for a long step in a type that has no fast products on this CPU."""
    operations = products_of_a_step(asked)
    dtype = precision_named(asked["precision"]).dtype if operations else torch.float32
    if dtype == torch.float32:
        return
    step_s = operations / (2 * PROBE**3) * seconds_of_a_product(dtype) / torch.get_num_threads()
    if step_s > LONGEST_STEP_S and is_slow(dtype):
        print(f"{asked['precision']}: a step would take about {step_s:.1f} s")
        raise Unsupported(
            f"{asked['precision']} has no fast products on this CPU: one takes over {SLOW} times "
            f"as long as in fp32, and a step would take over {LONGEST_STEP_S} s"
        )


def is_slow(dtype: torch.dtype) -> bool:
    """Whether products of this type take this CPU times out of all proportion."""
    return seconds_of_a_product(dtype) > SLOW * seconds_of_a_product(torch.float32)


def products_of_a_step(asked: Mapping[str, Any]) -> float:
    """FLOPs of the matrix products of a step of our model, or of attention forward and backward.

    0 for what nobody counts: a user's own model, ranks that choose their size, plain arithmetic.
    """
    if asked.get("model") == OUR_MODEL and "d_model" in asked:
        shape_class = import_path.resolve(MODEL_SHAPE)
        shape = shape_class(**{key: asked[key] for key in shape_class.__dataclass_fields__})
        phases = import_path.resolve(MODEL_FLOPS)(shape, mode=asked.get("mode", "train_step"))
        return sum(phase["matmul"] for phase in phases.values())
    if {"sequence", "head_dim"} <= set(asked):
        return float(import_path.resolve(ATTENTION_SHAPE)(asked).flops()["both"])
    return 0


@cache
def seconds_of_a_product(dtype: torch.dtype) -> float:
    """Time of one product of square matrices in one thread, asked once a process.

    With more threads even the shortest time holds a wait for whoever else uses a core, many times
    as long as the product in fp32. The first of three products prepares.
    """
    matrix, threads, times = torch.ones(PROBE, PROBE, dtype=dtype), torch.get_num_threads(), []
    torch.set_num_threads(1)
    try:
        for _ in range(3):
            start = time.perf_counter()
            matrix @ matrix
            times.append(time.perf_counter() - start)
    finally:
        torch.set_num_threads(threads)
    return min(times)
