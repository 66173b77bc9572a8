"""How large a batch must be before devices compute longer than they talk.

One block of two linear layers, weights and activations in bf16 (2 bytes), a batch of B tokens on
N devices that compute C operations a second and talk at W bytes a second over one axis of their
network; over M axes at M times that. Times of one forward pass, following the book-keeping of
"How to Scale Your Model" (its chapter on training):

    compute               4 B D F / (N C)
    gather the weights    4 D F / (Y W M_x)      FSDP: X devices, each group's 1/Y of the weights
    exchange activations  4 B D / (X W M_y)      tensor parallel: Y devices, each group's 1/X of B

The ratio C / W, operations for every byte, decides everything: the intensity of the machine. Where
messages hide behind the computation it is enough that neither of them takes longer; where they do
not, that both together do not.

    FSDP alone needs       B / N > intensity / M_x
    FSDP with Y-fold TP    B / N > intensity / (M_x Y)
    TP alone, any batch    Y < M_y F / intensity
    the best X and Y       B / N > intensity^2 / (M_x M_y F)

Data parallelism exchanges twice the bytes in backward that FSDP gathers in forward, beside twice
the computation: the same batch.
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
        """Operations that a device does while a byte is on its way."""
        return self.flops_per_s / self.bytes_per_s


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """Devices in two directions, and how many axes of the network serve each."""

    fsdp: int
    tp: int
    fsdp_axes: int = 1
    tp_axes: int = 1

    @property
    def devices(self) -> int:
        """All of them."""
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
    """Forward of one block, by its three parts; a direction of one device sends nothing."""
    weights_bytes = 4 * d_model * d_ff / mesh.tp * (mesh.fsdp > 1)
    activations_bytes = 4 * tokens * d_model / mesh.fsdp * (mesh.tp > 1)
    return BlockTimes(
        compute=4 * tokens * d_model * d_ff / (mesh.devices * network.flops_per_s),
        weights=weights_bytes / (network.bytes_per_s * mesh.fsdp_axes),
        activations=activations_bytes / (network.bytes_per_s * mesh.tp_axes),
    )


def tokens_when_hidden(
    network: Network, mesh: Mesh, *, d_ff: int, weight_bytes: float = BF16_BYTES
) -> float | None:
    """Tokens of the whole batch from which no message takes longer than the computation.

    None where the activations' exchange does: it grows with the batch as the computation does.
    """
    if mesh.tp > 1 and mesh.tp > most_tensor_parallel(network, d_ff=d_ff, axes=mesh.tp_axes):
        return None
    return tokens_for_weights(network, mesh) * weight_bytes / BF16_BYTES


def tokens_for_weights(network: Network, mesh: Mesh) -> float:
    """Tokens of the whole batch whose computation takes as long as gathering the weights."""
    return mesh.fsdp * network.intensity / mesh.fsdp_axes if mesh.fsdp > 1 else 0.0


def tokens_when_exposed(network: Network, mesh: Mesh, *, d_ff: int) -> float | None:
    """The same where messages follow one another and the computation covers their sum."""
    share = mesh.tp * network.intensity / (mesh.tp_axes * d_ff) if mesh.tp > 1 else 0.0
    if share >= 1:
        return None
    return tokens_for_weights(network, mesh) / (1 - share)


def most_tensor_parallel(network: Network, *, d_ff: int, axes: int = 1) -> float:
    """The degree of tensor parallelism up to which exchanging activations stays hidden."""
    return axes * d_ff / network.intensity


def fewest_tokens_a_device(
    network: Network, *, d_ff: int, fsdp_axes: int = 1, tp_axes: int = 1
) -> float:
    """Tokens for each device at the best split; FSDP alone where tensor parallelism never hides."""
    alone = network.intensity / fsdp_axes
    return alone * min(1.0, network.intensity / (tp_axes * d_ff))


def best_fsdp(
    tokens: float, devices: int, *, d_ff: int, fsdp_axes: int = 1, tp_axes: int = 1
) -> float:
    """The FSDP degree at which both messages take equally long."""
    return math.sqrt(tokens / d_ff * fsdp_axes / tp_axes * devices)
