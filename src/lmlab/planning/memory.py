"""Memory to train a large stack of feed-forward blocks, unsharded and sharded.

In a very large Transformer nearly all parameters and FLOPs are in the feed-forward layers, so the
model here consists of those alone: blocks of two linear layers, d_model to d_ff and back, no bias.

Training state is fp32 master weights, gradients and AdamW's two moments, 4 bytes each. Activations
are bf16: the backward of a linear layer needs its input, so a block saves d_model + d_ff numbers
per token. Over N devices, the state and a given share of the activations are sharded; the rest of
the activations is replicated.
"""

import math
from dataclasses import dataclass

FP32_BYTES, BF16_BYTES = 4, 2
_PARTS = ("weights", "gradients", "master weights", "moments")
BYTES_PER_PARAMETER: dict[str, dict[str, int]] = {
    "fp32": dict(zip(_PARTS, (4, 4, 0, 8), strict=True)),
    "bf16, fp32 master weights": dict(zip(_PARTS, (2, 2, 4, 8), strict=True)),
    "bf16, fp32 master weights and gradients": dict(zip(_PARTS, (2, 4, 4, 8), strict=True)),
}
"""What training with AdamW stores per parameter: mixed precision saves activations and time, not
state, because the optimizer still needs the digits that bf16 does not have."""


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """A stack of blocks of two linear layers."""

    d_model: int
    d_ff: int
    num_blocks: int

    @property
    def parameters(self) -> int:
        return self.num_blocks * 2 * self.d_model * self.d_ff

    @property
    def activation_bytes_per_token(self) -> int:
        """The bf16 inputs of both linear layers of every block."""
        return self.num_blocks * (self.d_model + self.d_ff) * BF16_BYTES


def training_state(blocks: Blocks) -> dict[str, int]:
    """Bytes of weights, gradients and optimizer state, which do not depend on the batch."""
    each = blocks.parameters * FP32_BYTES
    return {"master_weights": each, "gradients": each, "optimizer": 2 * each}


def devices_for(total_bytes: float, device_bytes: float) -> int:
    """The number of devices needed to hold `total_bytes`."""
    return math.ceil(total_bytes / device_bytes)


def sharded_bytes(state: float, activations: float, devices: int, *, share: float) -> float:
    """Bytes per device with the state and that share of the activations sharded."""
    return (state + share * activations) / devices + (1 - share) * activations


def min_devices(
    state: float, activations: float, device_bytes: float, *, share: float
) -> int | None:
    """The smallest number of devices that fits; None if no number does."""
    left = device_bytes - (1 - share) * activations
    return math.ceil((state + share * activations) / left) if left > 0 else None
