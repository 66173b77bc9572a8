"""Steps and bytes per rank of two all-reduce algorithms.

A ring all-reduce is a reduce-scatter and an all-gather of n - 1 steps each; every step sends one
n-th of the tensor to the next rank. Alternatively every rank passes whole tensors around the ring
and sums what it receives: half the steps, n / 2 times the bytes.
"""


def all_reduce(ranks: int) -> dict[str, tuple[int, float]]:
    """Sequential messages of each rank, and bytes that it sends per byte of the tensor."""
    others = ranks - 1
    return {"ring": (2 * others, 2 * others / ranks), "whole tensors": (others, float(others))}
