"""Measured ceilings: the fastest matrix product and the fastest copy on this machine.

A datasheet quotes the rate at the highest clock; under load, power and temperature limit it (a good
H200 reaches about 80 % of its bf16 peak). The share of a measured ceiling is therefore the fairer
metric for a model, and the only one on a machine without a known peak.

Matrix products use random operands, never zeros: bits that do not flip use less power, the clock
stays higher and the same product measures up to a fifth faster. Copy bandwidth counts both the read
and the write of every byte. A CPU cache also fetches a line before overwriting it, so the actual
traffic is up to half as much again. A ceiling that cannot be measured gets a reason, not a number.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from lmlab.measure.device import is_out_of_memory
from lmlab.measure.kernel_clock import measure_kernel
from lmlab.measure.precision import PRECISIONS, tf32_allowed, why_unsupported
from lmlab.measure.records import Record, value, without_value

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


def measure_ceilings(device: torch.device, *, quick: bool = False) -> list[Record]:
    """Ceilings of `device`; `quick` yields records of the same form, but inaccurate."""
    plan = GPU_PLAN if device.type == "cuda" else CPU_PLAN
    if quick:
        sides: tuple[int, ...] = (QUICK_SIDE,)
        small = dict.fromkeys(plan.matmul_sides, sides)
        plan = Plan(matmul_sides=small, copy_bytes=16 * MIB, time_cap_s=0.08, min_time_s=0.02)
    matmuls = [
        matmul_ceiling(name, sides, device, plan) for name, sides in plan.matmul_sides.items()
    ]
    return [*matmuls, copy_ceiling(device, plan)]


def matmul_ceiling(name: str, sides: tuple[int, ...], device: torch.device, plan: Plan) -> Record:
    """The fastest matrix product in one precision, labeled with its side length."""
    found: list[Record] = []
    median_ms = 0.0
    reason = why_unsupported(name, device) or ""
    for side in () if reason else sides:
        # Doubling the side is eight times the work; start only if two calls fit the time cap.
        if median_ms * 8 * 2 > plan.time_cap_s * 1e3:
            break
        try:
            median_ms = _matmul_ms(name, side, device, plan)
        except (RuntimeError, MemoryError) as error:
            reason = _reason(error)
            break
        tflops = 2 * side**3 / (median_ms * 1e-3) / 1e12
        found.append(value("matmul_rate", tflops, "TFLOP/s", dtype=name, side=side))
    unsupported = without_value("matmul_rate", "unsupported", reason, dtype=name)
    return max(found, key=lambda record: record["value"], default=unsupported)


def _matmul_ms(name: str, side: int, device: torch.device, plan: Plan) -> float:
    precision = PRECISIONS[name]
    a, b = (torch.randn(side, side, device=device).to(precision.dtype) for _ in range(2))
    out = torch.empty_like(a)
    with torch.no_grad(), tf32_allowed(precision.tf32):
        return _median_ms(lambda: torch.mm(a, b, out=out), device, plan)


def copy_ceiling(device: torch.device, plan: Plan) -> Record:
    """Copy bandwidth, counting bytes read plus bytes written."""
    try:
        source = torch.rand(plan.copy_bytes // 4, device=device)
        target = torch.empty_like(source)
        median_ms = _median_ms(lambda: target.copy_(source), device, plan)
    except (RuntimeError, MemoryError) as error:
        return without_value("copy_bandwidth", "failed", _reason(error))
    moved = 2 * plan.copy_bytes
    return value("copy_bandwidth", moved / (median_ms * 1e-3) / 1e9, "GB/s", bytes=moved)


def _median_ms(fn: Callable[[], object], device: torch.device, plan: Plan) -> float:
    return measure_kernel(
        fn, device=device, time_cap_s=plan.time_cap_s, min_time_s=plan.min_time_s
    ).median_ms


def _reason(error: Exception) -> str:
    return "out of memory" if is_out_of_memory(error) else str(error).splitlines()[0]
