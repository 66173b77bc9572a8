"""Assigns whole parameters to ranks so that every rank has about the same number of bytes.

Parameters are not split, because an optimizer may treat them as matrices, so this is bin packing.
Largest first, each to the rank with the least so far, is within 4/3 of the optimum, and close to it
for a Transformer with its dozens of parameters of equal size. The result depends on sizes and order
only, so all ranks compute the same one without communication.
"""

from collections.abc import Iterable

from torch import Tensor


class Ownership:
    """The rank that owns each parameter."""

    def __init__(self, world_size: int) -> None:
        self.owner: dict[Tensor, int] = {}
        self.bytes_by_rank = [0] * world_size

    def add(self, parameters: Iterable[Tensor]) -> None:
        """Assign more parameters; trainable ones first, because frozen ones have no state."""
        for parameter in sorted(parameters, key=lambda p: (not p.requires_grad, -p.nbytes)):
            rank = self.bytes_by_rank.index(min(self.bytes_by_rank))
            self.owner[parameter] = rank
            self.bytes_by_rank[rank] += parameter.nbytes

    def owned_by(self, rank: int) -> list[Tensor]:
        """The parameters of one rank, in the order of assignment."""
        return [parameter for parameter, owner in self.owner.items() if owner == rank]
