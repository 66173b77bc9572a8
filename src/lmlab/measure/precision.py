"""Number formats of a run, by name, and the switches that make the name true.

On NVIDIA GPUs since Ampere an "fp32" matrix product may quietly run in TF32: same exponent, 10
instead of 23 mantissa bits, several times faster. A comparison of fp32 with bf16 is worth nothing
unless that is off, so here TF32 is on for `tf32` and off for every other name. `bf16` and `fp16`
are autocast: parameters stay fp32, matrix products run in the half type, reductions in fp32.

PyTorch keeps the switch twice, in an older interface (one word for all matrix products, one flag
for cuDNN) and a newer one (a word per backend and operation), and refuses to answer the older one
when the two disagree. So values are set through the older interface, which sets both, and on the
way out restored through the older and then the newer one, which leaves exactly what was found.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch


class PrecisionError(ValueError):
    """A precision that does not exist, or that this device does not have."""


@dataclass(frozen=True, kw_only=True)
class Precision:
    """What one name means."""

    name: str
    dtype: torch.dtype
    """Type of the operands of a matrix product."""
    autocast: bool
    """Parameters stay fp32 and operands are cast on the way in."""
    tf32: bool
    """fp32 matrix products may use TF32."""


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
    """Look a precision up."""
    if name not in PRECISIONS:
        raise PrecisionError(f"precision: got {name!r}, allowed are {', '.join(PRECISIONS)}")
    return PRECISIONS[name]


def why_unsupported(name: str, device: torch.device) -> str | None:
    """One line on why the device cannot do this precision; None when it can."""
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
def precision_context(name: str, device: torch.device) -> Iterator[Precision]:
    """Run the block in the named precision; every switch is as before afterwards."""
    precision = precision_named(name)
    if reason := why_unsupported(name, device):
        raise PrecisionError(f"precision: {reason}")
    with tf32_allowed(precision.tf32), _autocast(precision, device):
        yield precision


@contextmanager
def tf32_allowed(allowed: bool) -> Iterator[None]:
    """Allow or forbid TF32 in matrix products and convolutions for the block."""
    backends: Any = torch.backends
    switches = (
        backends.cuda.matmul,
        backends.mkldnn.matmul,
        backends.cudnn.conv,
        backends.cudnn.rnn,
    )
    word_before = torch.get_float32_matmul_precision()
    before = [switch.fp32_precision for switch in switches]
    cudnn_before = backends.cudnn.conv.fp32_precision == "tf32"
    _set_both("high" if allowed else "highest", allowed)
    try:
        yield
    finally:
        _set_both(word_before, cudnn_before)
        for switch, value in zip(switches, before, strict=True):
            switch.fp32_precision = value


def _set_both(matmul_word: str, cudnn_tf32: bool) -> None:
    torch.set_float32_matmul_precision(matmul_word)
    torch.backends.cudnn.allow_tf32 = cudnn_tf32


def _autocast(precision: Precision, device: torch.device) -> torch.autocast | nullcontext[None]:
    if not precision.autocast:
        return nullcontext()
    return torch.autocast(device.type, dtype=precision.dtype)
