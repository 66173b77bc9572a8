"""What is refused before it is measured: what a device does not have, or only in name.

A CPU without instructions for a half type still multiplies it, number by number: hundreds of times
slower than fp32, so that a study of minutes takes most of an hour, and its numbers say nothing that
the first of them did not. Such points end with a reason, unless they are small.

A refusal moves no number. So this module counts in no fingerprint, and what counts operations is
imported by name: else it would be in the closure of every point.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch

from lmlab import import_path
from lmlab.attention.support import why_unsupported
from lmlab.experiments.outcome import Unsupported
from lmlab.measure.precision import precision_named
from lmlab.study.points import Point

NARROW_HEAD = 16
EMULATED = 50
"""Times as long as in fp32. With instructions of its own a type takes a few times at most."""
LONGEST_STEP_S = 0.5
"""Of an emulated type: a point has some fifteen steps, and a chapter dozens of points."""
PROBE = 256
"""Rows and columns of the product that is timed: a hundredth of a step that is refused."""
OUR_MODEL = "lmlab.model.loading:DEFAULT"
MODEL_SHAPE = "lmlab.model.shape:ModelShape"
MODEL_FLOPS = "lmlab.model.cost:flops"
ATTENTION_SHAPE = "lmlab.experiments.attention.problem:shape_of"


def refuse_unsupported(point: Point, device: torch.device) -> None:
    """Raise `Unsupported` for a point that is not measured on this device, with the reason."""
    asked = {**point.settings, **point.parameters}
    refuse_unsupported_attention(asked, device)
    if device.type == "cpu":
        refuse_emulated_type(asked)


def refuse_unsupported_attention(asked: Mapping[str, Any], device: torch.device) -> None:
    """Raise `Unsupported` for a model whose attention is not measured on this device.

    Where variants are arms of one point, each arm stands or falls by itself.
    """
    if "attention" not in asked or "arms" in asked:
        return
    # Ranks choose the size themselves, from what fits; narrow heads fit every variant.
    head_dim = asked["d_model"] // asked["num_heads"] if "num_heads" in asked else NARROW_HEAD
    dtype = precision_named(asked["precision"]).dtype
    reason = why_unsupported(asked["attention"], device=device, dtype=dtype, head_dim=head_dim)
    if reason:
        raise Unsupported(f"attention = {asked['attention']!r}: {reason}")


def refuse_emulated_type(asked: Mapping[str, Any]) -> None:
    """Raise `Unsupported` for a long step in a type that the CPU has no instructions for."""
    operations = products_of_a_step(asked)
    dtype = precision_named(asked["precision"]).dtype if operations else torch.float32
    if dtype == torch.float32:
        return
    step_s = operations / (2 * PROBE**3) * seconds_of_a_product(dtype)
    if step_s > LONGEST_STEP_S and is_emulated(dtype):
        print(f"{asked['precision']}: a step would take about {step_s:.1f} s")
        raise Unsupported(
            f"{asked['precision']} is emulated on this CPU: a product takes over {EMULATED} times "
            f"as long as in fp32, and a step would take over {LONGEST_STEP_S} s"
        )


def is_emulated(dtype: torch.dtype) -> bool:
    """Whether the CPU multiplies this type without instructions of its own, told by the clock."""
    return seconds_of_a_product(dtype) > EMULATED * seconds_of_a_product(torch.float32)


def products_of_a_step(asked: Mapping[str, Any]) -> float:
    """FLOPs of the matrix products of a step of our model, or of attention forward and backward.

    0 for what nobody counts: a user's own model, ranks that choose their size, plain arithmetic.
    """
    if asked.get("model") == import_path.resolve(OUR_MODEL) and "d_model" in asked:
        shape_class = import_path.resolve(MODEL_SHAPE)
        shape = shape_class(**{key: asked[key] for key in shape_class.__dataclass_fields__})
        phases = import_path.resolve(MODEL_FLOPS)(shape, mode=asked.get("mode", "train_step"))
        return sum(phase["matmul"] for phase in phases.values())
    if {"sequence", "head_dim"} <= set(asked):
        return float(import_path.resolve(ATTENTION_SHAPE)(asked).flops()["both"])
    return 0


def seconds_of_a_product(dtype: torch.dtype) -> float:
    """Time of one product of square matrices; the first one prepares."""
    matrix = torch.ones(PROBE, PROBE, dtype=dtype)
    times = []
    for _ in range(3):
        start = time.perf_counter()
        matrix @ matrix
        times.append(time.perf_counter() - start)
    return min(times)
