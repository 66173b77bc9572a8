"""Precisions by name, and the switches that make fp32 mean fp32.

On NVIDIA GPUs since Ampere an "fp32" matrix product may silently run in TF32 (10 instead of 23
mantissa bits, several times faster), which would invalidate any comparison of fp32 with bf16. So
TF32 is on for `tf32` and off for every other name. `bf16` and `fp16` are autocast: parameters stay
fp32, matrix products run in the 16-bit type, reductions in fp32.

PyTorch has an older and a newer interface to this switch, and reading the older one fails if the
two disagree. Values are set through the older one, which sets both, and restored through the older
and then the newer one, which gives exactly the previous state.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch


class PrecisionError(ValueError):
    """An unknown precision."""


@dataclass(frozen=True, kw_only=True)
class Precision:
    """What one precision name means."""

    name: str
    dtype: torch.dtype  # type of matrix product operands
    autocast: bool  # parameters stay fp32; operands are cast
    tf32: bool  # fp32 matrix products may use TF32


PRECISIONS: dict[str, Precision] = {
    precision.name: precision
    for precision in (
        Precision(name="fp32", dtype=torch.float32, autocast=False, tf32=False),
        Precision(name="tf32", dtype=torch.float32, autocast=False, tf32=True),
        Precision(name="bf16", dtype=torch.bfloat16, autocast=True, tf32=False),
        Precision(name="fp16", dtype=torch.float16, autocast=True, tf32=False),
    )
}


def precision_named(name: str) -> Precision:
    """Look up a precision by name."""
    if name not in PRECISIONS:
        raise PrecisionError(f"precision = {name!r}; allowed: {', '.join(PRECISIONS)}")
    return PRECISIONS[name]


def why_unsupported(name: str, device: torch.device) -> str | None:
    """Why the device does not support this precision, in one line; None if it does."""
    precision = precision_named(name)
    if precision.tf32 and device.type != "cuda":
        return "tf32 exists on NVIDIA GPUs of compute capability 8.0 and newer, not on a CPU"
    if device.type != "cuda" or name in ("fp32", "fp16"):
        return None
    major, minor = torch.cuda.get_device_capability(device)
    if major < 8:
        return f"{name} needs compute capability 8.0 or newer, this GPU has {major}.{minor}"
    return None


@contextmanager
def tf32_allowed(allowed: bool) -> Iterator[None]:
    """Allow or forbid TF32 in matrix products and convolutions for the block."""
    backends: Any = torch.backends
    cudnn = backends.cudnn
    switches = (backends.cuda.matmul, backends.mkldnn.matmul, cudnn.conv, cudnn.rnn)
    matmul_before = torch.get_float32_matmul_precision()
    before = [switch.fp32_precision for switch in switches]
    cudnn_before = cudnn.conv.fp32_precision == "tf32"
    _set_both("high" if allowed else "highest", allowed)
    try:
        yield
    finally:
        _set_both(matmul_before, cudnn_before)
        for switch, value in zip(switches, before, strict=True):
            switch.fp32_precision = value


def _set_both(matmul_precision: str, cudnn_tf32: bool) -> None:
    torch.set_float32_matmul_precision(matmul_precision)
    torch.backends.cudnn.allow_tf32 = cudnn_tf32
