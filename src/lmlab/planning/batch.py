"""How large a batch must be for computation to take longer than communication.

One block of two linear layers with bf16 weights and activations, a batch of B tokens, and N devices
with C FLOP/s and W bytes/s over one axis of their network (M W over M axes). Times of a forward
pass, as in the training chapter of "How to Scale Your Model":

    compute                 4 B D F / (N C)
    gather weights          4 D F / (Y W M_x)      FSDP over X devices, each with 1/Y of the weights
    exchange activations    4 B D / (X W M_y)      tensor parallel over Y devices, 1/X of the batch

The arithmetic intensity of the network, C / W in FLOPs per byte, decides everything. If
communication overlaps with computation, neither message may take longer than the computation; if it
is exposed, their sum may not.

    FSDP alone needs         B / N > intensity / M_x
    FSDP with Y-fold TP      B / N > intensity / (M_x Y)
    TP alone, any batch      Y < M_y F / intensity
    the best X and Y         B / N > intensity^2 / (M_x M_y F)

Data parallelism needs the same batch: in backward it sends twice the bytes that FSDP gathers in
forward, during twice the computation.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from lmlab.planning.memory import BF16_BYTES


@dataclass(frozen=True, kw_only=True)
class Network:
    """A device and its connection to the others."""

    flops_per_s: float
    bytes_per_s: float
    """Over one axis, both directions together."""

    @property
    def intensity(self) -> float:
        """FLOPs that a device computes while it sends one byte."""
        return self.flops_per_s / self.bytes_per_s


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """FSDP and tensor-parallel degrees, and the network axes that serve each."""

    fsdp: int
    tp: int
    fsdp_axes: int = 1
    tp_axes: int = 1

    @property
    def devices(self) -> int:
        return self.fsdp * self.tp


@dataclass(frozen=True, kw_only=True)
class BlockTimes:
    """Seconds of one block's forward pass."""

    compute: float
    weights: float
    activations: float


def block_times(
    network: Network, mesh: Mesh, *, d_model: int, d_ff: int, tokens: float
) -> BlockTimes:
    """Forward times of one block; a mesh dimension of one device sends nothing."""
    weights_bytes = 4 * d_model * d_ff / mesh.tp * (mesh.fsdp > 1)
    activations_bytes = 4 * tokens * d_model / mesh.fsdp * (mesh.tp > 1)
    return BlockTimes(
        compute=4 * tokens * d_model * d_ff / (mesh.devices * network.flops_per_s),
        weights=weights_bytes / (network.bytes_per_s * mesh.fsdp_axes),
        activations=activations_bytes / (network.bytes_per_s * mesh.tp_axes),
    )


def min_tokens_overlapped(
    network: Network, mesh: Mesh, *, d_ff: int, weight_bytes: float = BF16_BYTES
) -> float | None:
    """Smallest batch, in tokens, at which computation hides every message.

    None if the exchange of activations takes longer at any batch: it grows like the computation.
    """
    if mesh.tp > 1 and mesh.tp > max_tensor_parallel(network, d_ff=d_ff, axes=mesh.tp_axes):
        return None
    return _min_tokens_for_gather(network, mesh) * weight_bytes / BF16_BYTES


def min_tokens_exposed(network: Network, mesh: Mesh, *, d_ff: int) -> float | None:
    """The same if messages do not overlap and the computation must outlast their sum."""
    share = mesh.tp * network.intensity / (mesh.tp_axes * d_ff) if mesh.tp > 1 else 0.0
    return None if share >= 1 else _min_tokens_for_gather(network, mesh) / (1 - share)


def _min_tokens_for_gather(network: Network, mesh: Mesh) -> float:
    """Batch at which computation takes as long as gathering the weights."""
    return mesh.fsdp * network.intensity / mesh.fsdp_axes if mesh.fsdp > 1 else 0.0


def max_tensor_parallel(network: Network, *, d_ff: int, axes: int = 1) -> float:
    """The largest tensor-parallel degree at which the exchange of activations is hidden."""
    return axes * d_ff / network.intensity


def min_tokens_per_device(
    network: Network, *, d_ff: int, fsdp_axes: int = 1, tp_axes: int = 1
) -> float:
    """Smallest batch per device at the best split; FSDP alone if TP is never hidden."""
    alone = network.intensity / fsdp_axes
    return alone * min(1.0, network.intensity / (tp_axes * d_ff))


def best_fsdp(
    tokens: float, devices: int, *, d_ff: int, fsdp_axes: int = 1, tp_axes: int = 1
) -> float:
    """The FSDP degree at which both messages take equally long."""
    return math.sqrt(tokens / d_ff * fsdp_axes / tp_axes * devices)
