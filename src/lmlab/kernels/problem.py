"""An attention problem and its device: everything that the choice of a launch depends on."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor

Direction = Literal["forward", "backward"]

BLOCK_ROWS = 64
"""Rows in which the size of a problem is counted."""
SMALLEST_TILE = 16
"""A tensor-core product needs 16 rows."""


class UnsupportedDevice(ValueError):
    """A device that the kernels do not run on."""


@dataclass(frozen=True)
class DeviceInfo:
    """Device properties that a launch depends on."""

    architecture: str
    num_sms: int
    shared_limit: int
    """Shared memory that one program may use, in bytes."""
    l2_bytes: int


def architecture(major: int, minor: int) -> str | None:
    """Architecture name of a compute capability; None before Ampere."""
    if major >= 10:
        return "blackwell"
    if major == 9:
        return "hopper"
    if (major, minor) == (8, 9):
        return "ada"
    return "ampere" if major == 8 else None


@cache
def device_info(device: torch.device) -> DeviceInfo:
    """The properties of a device; a CPU runs the interpreter, which has no practical limits."""
    if device.type != "cuda":
        return DeviceInfo("cpu", 1, 2**30, 2**30)
    gpu: Any = torch.cuda.get_device_properties(device)
    name = architecture(gpu.major, gpu.minor)
    if name is None:
        raise UnsupportedDevice(
            f"flash: {gpu.name} has compute capability {gpu.major}.{gpu.minor},"
            " 8.0 or newer is needed"
        )
    return DeviceInfo(
        name, gpu.multi_processor_count, gpu.shared_memory_per_block_optin, gpu.L2_cache_size
    )


@dataclass(frozen=True)
class Problem:
    """Shapes, type, mask and direction of one call."""

    device: torch.device
    dtype: torch.dtype
    batch: int
    heads: int
    kv_heads: int
    queries: int
    keys: int
    head_dim: int
    is_causal: bool
    tf32: bool
    direction: Direction

    @classmethod
    def of(cls, q: Tensor, k: Tensor, is_causal: bool, direction: Direction) -> Problem:
        """The problem of a call with four-dimensional q and k."""
        tf32 = q.dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32"
        batch, heads, queries, head_dim = q.shape
        _, kv_heads, keys, _ = k.shape
        return cls(
            q.device, q.dtype, batch, heads, kv_heads, queries, keys, head_dim, is_causal, tf32,
            direction,
        )  # fmt: skip

    @property
    def batch_heads(self) -> int:
        """Query heads of the whole batch."""
        return self.batch * self.heads

    @property
    def batch_kv_heads(self) -> int:
        """Key and value heads of the whole batch."""
        return self.batch * self.kv_heads

    @property
    def group_size(self) -> int:
        """Query heads per key and value head."""
        return self.heads // self.kv_heads

    @property
    def gpu(self) -> DeviceInfo:
        """The properties of its device."""
        return device_info(self.device)

    @property
    def bits(self) -> int:
        """Bits of the input type, 16 or 32."""
        return 8 * self.dtype.itemsize

    @property
    def sequence(self) -> int:
        """The longer of queries and keys: the length of a program's loop."""
        return max(self.queries, self.keys)

    @property
    def blocks_per_sm(self) -> float:
        """Blocks of BLOCK_ROWS queries in the whole batch per SM: how full the GPU is."""
        return self.batch_heads * ceil_div(self.queries, BLOCK_ROWS) / self.gpu.num_sms

    @property
    def is_whole(self) -> bool:
        """Whether queries and keys are multiples of BLOCK_ROWS."""
        return self.queries % BLOCK_ROWS == 0 and self.keys % BLOCK_ROWS == 0


def power_of_two(number: int) -> int:
    """The next power of two, at least the smallest tile."""
    return max(SMALLEST_TILE, 1 << (number - 1).bit_length())


def ceil_div(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)
