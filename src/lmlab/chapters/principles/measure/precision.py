"""Low precision: fewer bits per number mean more numbers per second, and larger errors.

Tensor cores multiply 16-bit numbers at twice the rate of TF32 and 8-bit ones at twice that again;
plain fp32 uses the ordinary cores. Square matrices of each type and size are multiplied, rounded
from the same fp32 numbers; errors are taken on the first rows, against their float64 product.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from lmlab.chapters.principles.measure.programs import Program, asked_of, compare
from lmlab.jobs.outcome import Outcome, Unsupported
from lmlab.jobs.preflight import SLOW, product_s
from lmlab.measure.precision import PRECISIONS, tf32_allowed, why_unsupported
from lmlab.study.points import Point

CHECKED_ROWS = 256
WITHIN = {"fp32": 1e-5, "tf32": 2e-3, "fp16": 2e-3, "bf16": 1e-2, "fp8": 0.1}
FP8 = "fp8"
FP8_MAX = 448.0
FP8_CAPABILITY = (8, 9)


def measure(point: Point, device: torch.device) -> Outcome:
    """Every type at every size."""
    asked = asked_of(point)
    programs = {}
    for side in asked["sides"]:
        a, b = torch.randn(side, side, device=device), torch.randn(side, side, device=device)
        exact = a[:CHECKED_ROWS].double() @ b.double()
        for name in asked["precisions"]:
            reason = why_not(name, device)
            pair = {"fp32": "without", "bf16": "with"}.get(name, "")
            programs[f"{name}, {side}"] = Program(
                call=(lambda: None) if reason else product(name, a, b),
                expected=exact,
                within=WITHIN[name],
                series=name,
                x=side,
                pair=pair if side == max(asked["sides"]) else "",
                unsupported=reason or "",
                numbers={"flops": 2 * side**3},
            )
    return compare(programs, asked, device).outcome()


def why_not(name: str, device: torch.device) -> str | None:
    """Why the type is not measured here, or None."""
    if name == FP8:
        fits = device.type == "cuda" and torch.cuda.get_device_capability(device) >= FP8_CAPABILITY
        return None if fits else "fp8 needs an NVIDIA GPU of compute capability 8.9 or newer"
    # Without instructions for a type, a CPU multiplies element by element.
    dtype = PRECISIONS[name].dtype
    if device.type == "cpu" and product_s(dtype) > SLOW * product_s(torch.float32):
        return f"{name} has no fast matmul on this CPU"
    return why_unsupported(name, device)


def product(name: str, a: Tensor, b: Tensor) -> Callable[[], Tensor]:
    """The call that multiplies in this type."""
    if name == FP8:
        return fp8_product(a, b)
    precision = PRECISIONS[name]
    left, right = a.to(precision.dtype), b.to(precision.dtype)

    def call() -> Tensor:
        with tf32_allowed(precision.tf32):
            return torch.mm(left, right)

    return call


def fp8_product(a: Tensor, b: Tensor) -> Callable[[], Tensor]:
    """e4m3 with one scale per matrix; results in bf16."""
    if not hasattr(torch, "_scaled_mm"):
        raise Unsupported("this version of PyTorch has no scaled matmul")
    scales = [x.abs().max() / FP8_MAX for x in (a, b)]
    left, right = (
        (x / scale).to(torch.float8_e4m3fn) for x, scale in zip((a, b), scales, strict=True)
    )
    columns = right.t().contiguous().t()
    return partial(
        torch._scaled_mm, left, columns, scale_a=scales[0], scale_b=scales[1],
        out_dtype=torch.bfloat16,
    )  # fmt: skip
