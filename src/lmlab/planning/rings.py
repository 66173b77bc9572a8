"""Two all-reduce algorithms by the bytes and steps of each rank.

A ring all-reduce is a reduce-scatter and an all-gather of n - 1 steps each; every step sends one
n-th of the tensor to the next rank. Alternatively every rank passes whole tensors around the ring
and sums what it receives: half the steps, n / 2 times the bytes.
"""


def ring_bytes(size: float, ranks: int) -> float:
    """Bytes that each rank sends in a ring all-reduce of `size` bytes."""
    return 2 * (ranks - 1) * size / ranks


def gather_bytes(size: float, ranks: int) -> float:
    """Bytes that each rank sends when whole tensors are passed around."""
    return (ranks - 1) * size


def ring_steps(ranks: int) -> int:
    """Consecutive messages of a ring all-reduce."""
    return 2 * (ranks - 1)


def gather_steps(ranks: int) -> int:
    """Consecutive messages when whole tensors are passed around."""
    return ranks - 1
