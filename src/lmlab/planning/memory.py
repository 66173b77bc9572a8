"""What training a large feed-forward stack keeps in memory, whole and sharded.

In a very large Transformer nearly all parameters and operations are in the feed-forward layers, so
the model here is those alone: blocks of two linear layers, d_model to d_ff and back, no bias.

- Training state: fp32 master weights, accumulated gradients, and AdamW's two moments, 4 bytes each.
- Activations, in bf16: backward of a linear layer needs its input, so a block keeps d_model + d_ff
  numbers a token.

Sharded over N devices, state is cut into N parts, and so is a share of the activations; the rest of
them stays on every device.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

FP32_BYTES, BF16_BYTES = 4, 2
ADAMW_MOMENTS = 2


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """A stack of blocks of two linear layers."""

    d_model: int
    d_ff: int
    num_blocks: int

    @property
    def parameters(self) -> int:
        """Two matrices a block."""
        return self.num_blocks * 2 * self.d_model * self.d_ff

    @property
    def activation_bytes_per_token(self) -> int:
        """The inputs of both linear layers of every block, in bf16."""
        return self.num_blocks * (self.d_model + self.d_ff) * BF16_BYTES


@dataclass(frozen=True, kw_only=True)
class TrainingState:
    """Bytes that training holds whatever the batch."""

    master_weights: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.master_weights + self.gradients + self.optimizer


def training_state(blocks: Blocks) -> TrainingState:
    """fp32 weights, gradients and AdamW's moments."""
    each = blocks.parameters * FP32_BYTES
    return TrainingState(master_weights=each, gradients=each, optimizer=ADAMW_MOMENTS * each)


def activation_bytes(blocks: Blocks, tokens: int) -> int:
    """What a batch of that many tokens keeps for backward."""
    return blocks.activation_bytes_per_token * tokens


def devices_for(total_bytes: float, device_bytes: float) -> int:
    """How many devices have that much memory together."""
    return math.ceil(total_bytes / device_bytes)


def sharded_bytes(state: float, activations: float, devices: int, *, share: float) -> float:
    """Bytes on each device when state and that share of the activations are cut into parts."""
    return (state + share * activations) / devices + (1 - share) * activations


def fewest_devices(
    state: float, activations: float, device_bytes: float, *, share: float
) -> int | None:
    """The least number of devices that each stay within their memory; None if none is enough."""
    left = device_bytes - (1 - share) * activations
    if left <= 0:
        return None
    return math.ceil((state + share * activations) / left)
