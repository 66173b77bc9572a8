"""Two ways to add up a tensor on all ranks, by what each rank sends.

A ring all-reduce is a reduce-scatter and an all-gather: n - 1 steps each, in every step one n-th of
the tensor to the next rank. Without the reduce-scatter every rank passes its whole tensor around
and adds up what arrives: half the steps, n / 2 times the bytes. With a latency for each step and a
bandwidth for each byte the first costs less, but for small tensors on more than two ranks.
"""

from __future__ import annotations

import math


def ring_bytes(size: float, ranks: int) -> float:
    """Bytes that each rank sends in a ring all-reduce of `size` bytes."""
    return 2 * (ranks - 1) * size / ranks


def gather_bytes(size: float, ranks: int) -> float:
    """Bytes that each rank sends when whole tensors go around."""
    return (ranks - 1) * size


def ring_steps(ranks: int) -> int:
    """Messages that follow one another in a ring all-reduce."""
    return 2 * (ranks - 1)


def gather_steps(ranks: int) -> int:
    """Messages that follow one another when whole tensors go around."""
    return ranks - 1


def seconds(sent_bytes: float, steps: int, *, latency_s: float, bytes_per_s: float) -> float:
    """Time of that many steps that together send that many bytes."""
    return steps * latency_s + sent_bytes / bytes_per_s


def even_size(ranks: int, *, latency_s: float, bytes_per_s: float) -> float:
    """Bytes up to which whole tensors are no slower than the ring; infinite for two ranks."""
    if ranks <= 2:
        return math.inf
    return latency_s * bytes_per_s / (1 - 2 / ranks)
