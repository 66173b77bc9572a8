"""Measured ceilings: the fastest matrix product and the fastest copy on this machine.

A datasheet gives the rate at the highest clock; under load, power and temperature limit it (a good
H200 reaches about 80 % of its bf16 peak). The share of a measured ceiling is therefore the fairer
grade for a model, and the only one on a machine without a known peak.

Matrix products use random operands, never zeros: bits that do not flip use less power, the clock
stays higher and the same product measures up to a fifth faster. A copy reads and writes every byte,
and both count. A CPU's caches fetch a line before it is overwritten, so its memory moves up to half
as much again. What cannot be measured has a reason instead of a number.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from lmlab.measure.device import is_out_of_memory
from lmlab.measure.kernel_clock import measure_kernel
from lmlab.measure.precision import PRECISIONS, tf32_allowed, why_unsupported

GIB = 2**30
MIB = 2**20
QUICK_SIDE = 256


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What to measure on one kind of device, and for how long."""

    matmul_sides: dict[str, tuple[int, ...]]
    """Precision -> side lengths of the square products, ascending."""
    copy_bytes: int
    time_cap_s: float
    """Per shape, warm-up included; a shape that clearly does not fit is not started."""
    min_time_s: float


GPU_PLAN = Plan(
    matmul_sides={
        **dict.fromkeys(("fp32", "tf32"), (4096, 8192)),
        **dict.fromkeys(("fp16", "bf16"), (4096, 8192, 16384)),
    },
    copy_bytes=2 * GIB,
    time_cap_s=1.0,
    min_time_s=0.1,
)
CPU_PLAN = Plan(
    matmul_sides={"fp32": (512, 1024, 2048), "bf16": (512, 1024, 2048)},
    copy_bytes=256 * MIB,
    time_cap_s=0.8,
    min_time_s=0.1,
)


def measure_ceilings(device: torch.device, *, quick: bool = False) -> dict[str, Any]:
    """Ceilings of `device`; `quick` gives a result of the same form with little accuracy."""
    plan = GPU_PLAN if device.type == "cuda" else CPU_PLAN
    if quick:
        sides: tuple[int, ...] = (QUICK_SIDE,)
        small = dict.fromkeys(plan.matmul_sides, sides)
        plan = Plan(matmul_sides=small, copy_bytes=16 * MIB, time_cap_s=0.08, min_time_s=0.02)
    return {
        "matmul_tflops": {
            name: matmul_ceiling(name, sides, device, plan)
            for name, sides in plan.matmul_sides.items()
        },
        "copy_gb_per_s": copy_ceiling(device, plan),
    }


def matmul_ceiling(
    name: str, sides: tuple[int, ...], device: torch.device, plan: Plan
) -> dict[str, Any]:
    """The fastest product of one precision: `{"tflops", "shape", "median_ms", "reason"}`."""
    found: list[dict[str, Any]] = []
    nothing = {"tflops": None, "shape": None, "median_ms": None}
    if reason := why_unsupported(name, device):
        return {**nothing, "reason": reason}
    for side in sides:
        # Twice the side is eight times the work; start only what leaves time for two calls.
        if found and found[-1]["median_ms"] * 8 * 2 > plan.time_cap_s * 1e3:
            break
        row = _or_reason(partial(_matmul, name, side, device, plan), nothing)
        if row["tflops"] is None:
            return max([*found, row], key=lambda each: each["tflops"] or 0)
        found.append(row)
    return max(found, key=lambda each: each["tflops"])


def _matmul(name: str, side: int, device: torch.device, plan: Plan) -> dict[str, Any]:
    precision = PRECISIONS[name]
    a, b = (torch.randn(side, side, device=device).to(precision.dtype) for _ in range(2))
    out = torch.empty_like(a)
    with torch.no_grad(), tf32_allowed(precision.tf32):
        median_ms = _median_ms(lambda: torch.mm(a, b, out=out), device, plan)
    tflops = 2 * side**3 / (median_ms * 1e-3) / 1e12
    return {"tflops": tflops, "shape": [side] * 3, "median_ms": median_ms, "reason": None}


def copy_ceiling(device: torch.device, plan: Plan) -> dict[str, Any]:
    """Copy bandwidth: `{"gb_per_s", "bytes", "median_ms", "reason"}`; bytes read plus written."""
    nothing = {"gb_per_s": None, "bytes": None, "median_ms": None}
    return _or_reason(partial(_copy, device, plan), nothing)


def _copy(device: torch.device, plan: Plan) -> dict[str, Any]:
    source = torch.rand(plan.copy_bytes // 4, device=device)
    target = torch.empty_like(source)
    median_ms = _median_ms(lambda: target.copy_(source), device, plan)
    moved = 2 * plan.copy_bytes
    rate = moved / (median_ms * 1e-3) / 1e9
    return {"gb_per_s": rate, "bytes": moved, "median_ms": median_ms, "reason": None}


def _median_ms(fn: Callable[[], object], device: torch.device, plan: Plan) -> float:
    return measure_kernel(
        fn, device=device, time_cap_s=plan.time_cap_s, min_time_s=plan.min_time_s
    ).median_ms


def _or_reason(measure: Callable[[], dict[str, Any]], nothing: dict[str, Any]) -> dict[str, Any]:
    try:
        return measure()
    except (RuntimeError, MemoryError) as error:
        reason = "out of memory" if is_out_of_memory(error) else str(error).splitlines()[0]
        return {**nothing, "reason": reason}
