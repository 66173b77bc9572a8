"""The smallest batch, or the most devices, for which computation hides communication.

The model is one feed-forward block of m matrices of D x F (two linear layers, or the three of
SwiGLU) with 2-byte weights and activations, a batch of B tokens, and N devices with C FLOP/s and
W bytes/s over one network axis (M W over M axes). Backward computes twice what forward does: per
matrix, gradients of its input and its weights. Each device sends (an all-gather or reduce-scatter
of S bytes counts as S, an all-reduce as 2 S):

                        forward                     backward
    compute             2 m B D F FLOPs             4 m B D F FLOPs
    data parallel       nothing                     all-reduce of gradients, 4 m D F
    FSDP                gather weights, 2 m D F     gather and reduce-scatter, 4 m D F
    tensor parallel     all-reduce output, 4 B D    all-reduce of the input's gradient, 4 B D

A message is hidden while FLOPs / (N C) >= bytes / W, which gives one bound for every scheme:
N <= FLOPs / (bytes * intensity), with the intensity C / W in FLOPs per byte. For data parallelism
and FSDP that is B / N >= intensity, in both passes; for tensor parallelism N <= m F / (2 intensity)
forward, and twice that backward, whatever the batch.

On a mesh of X-fold FSDP and Y-fold tensor parallelism each message shrinks by the other's degree:
weights to 2 m D F / Y, activations to 4 B D / X. Times match at X^2 = 2 B N M_x / (m F M_y), the
best split whether the two axes overlap (the longer message counts) or not (their sum does). With
one network axis each, N <= B m F / (2 intensity^2) if they overlap, else a quarter.
"""

import math
from dataclasses import dataclass
from typing import Literal

from lmlab.planning.memory import BF16_BYTES

Scheme = Literal["data parallel", "FSDP", "tensor parallel"]
Pass = Literal["forward", "backward"]

ALL_REDUCE = 2  # sends its bytes twice


@dataclass(frozen=True, kw_only=True)
class Network:
    """A device and its connection to the others."""

    flops_per_s: float
    bytes_per_s: float  # over one axis, both directions together

    @property
    def intensity(self) -> float:
        """FLOPs that a device computes while it sends one byte."""
        return self.flops_per_s / self.bytes_per_s


@dataclass(frozen=True, kw_only=True)
class FeedForward:
    """One block: matrices between d_model and d_ff."""

    d_model: int
    d_ff: int
    matrices: int = 2

    @property
    def weight_bytes(self) -> float:
        return BF16_BYTES * self.matrices * self.d_model * self.d_ff

    def flops(self, tokens: float, direction: Pass = "forward") -> float:
        per_weight = 4.0 if direction == "backward" else 2.0
        return per_weight * tokens * self.matrices * self.d_model * self.d_ff

    def activation_bytes(self, tokens: float) -> float:
        """Bytes to all-reduce the block's input gradient or its output."""
        return ALL_REDUCE * BF16_BYTES * tokens * self.d_model


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """FSDP and tensor-parallel degrees, and the network axes that serve each."""

    fsdp: float
    tp: float
    fsdp_axes: int = 1
    tp_axes: int = 1

    @property
    def devices(self) -> float:
        return self.fsdp * self.tp


def message_bytes(block: FeedForward, scheme: Scheme, direction: Pass, tokens: float) -> float:
    """Bytes that each of many devices sends in one pass over one block."""
    if scheme == "tensor parallel":
        return block.activation_bytes(tokens)
    forward = 1 if scheme == "FSDP" else 0  # weights are gathered
    return block.weight_bytes * (2 if direction == "backward" else forward)


def max_devices(
    network: Network, block: FeedForward, scheme: Scheme, direction: Pass, tokens: float
) -> float:
    """The most devices at which computation hides the message; infinite if nothing is sent."""
    sent = message_bytes(block, scheme, direction, tokens)
    return block.flops(tokens, direction) / (sent * network.intensity) if sent else math.inf


def max_mesh_devices(
    network: Network, block: FeedForward, tokens: float, *, overlapped: bool
) -> float:
    """`max_devices` for the best split into FSDP and TP, with one network axis each."""
    most = tokens * block.matrices * block.d_ff / 2 / network.intensity**2
    return most if overlapped else most / 4


def best_fsdp(
    tokens: float, devices: float, block: FeedForward, *, fsdp_axes: int = 1, tp_axes: int = 1
) -> float:
    """The FSDP degree at which both messages take equally long."""
    return math.sqrt(2 * tokens / (block.matrices * block.d_ff) * fsdp_axes / tp_axes * devices)


def block_times(
    network: Network, mesh: Mesh, block: FeedForward, tokens: float
) -> dict[str, float]:
    """Seconds of one block's forward pass; a mesh dimension of one device sends nothing."""
    weights = block.weight_bytes / mesh.tp * (mesh.fsdp > 1)
    activations = block.activation_bytes(tokens) / mesh.fsdp * (mesh.tp > 1)
    return {
        "compute": block.flops(tokens) / (mesh.devices * network.flops_per_s),
        "weights": weights / (network.bytes_per_s * mesh.fsdp_axes),
        "activations": activations / (network.bytes_per_s * mesh.tp_axes),
    }


def min_tokens_overlapped(
    network: Network, mesh: Mesh, block: FeedForward, *, weight_bytes: float = BF16_BYTES
) -> float | None:
    """Smallest batch, in tokens, at which computation hides every message; None if no batch hides
    the all-reduce of activations, which grows in proportion to computation."""
    if mesh.tp > 1 and mesh.tp > max_tensor_parallel(network, block, axes=mesh.tp_axes):
        return None
    return _min_tokens_for_gather(network, mesh) * weight_bytes / BF16_BYTES


def min_tokens_exposed(network: Network, mesh: Mesh, block: FeedForward) -> float | None:
    """The same if messages do not overlap each other and computation must hide their sum."""
    most = max_tensor_parallel(network, block, axes=mesh.tp_axes)
    share = mesh.tp / most if mesh.tp > 1 else 0.0
    return None if share >= 1 else _min_tokens_for_gather(network, mesh) / (1 - share)


def _min_tokens_for_gather(network: Network, mesh: Mesh) -> float:
    """Batch, in tokens, at which computation takes as long as gathering the weights."""
    return mesh.fsdp * network.intensity / mesh.fsdp_axes if mesh.fsdp > 1 else 0.0


def max_tensor_parallel(network: Network, block: FeedForward, *, axes: int = 1) -> float:
    """The largest tensor-parallel degree at which the all-reduce of activations is hidden."""
    return axes * max_devices(network, block, "tensor parallel", "forward", 1)


def min_tokens_per_device(
    network: Network, block: FeedForward, *, fsdp_axes: int = 1, tp_axes: int = 1
) -> float:
    """Smallest batch per device at the best split; FSDP alone if TP is never hidden."""
    alone = network.intensity / fsdp_axes
    return alone * min(1.0, 1 / max_tensor_parallel(network, block, axes=tp_axes))
