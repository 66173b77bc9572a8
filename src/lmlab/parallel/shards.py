"""Who owns which parameter: whole ones, dealt out so that ranks keep about equally many bytes.

An optimizer may look at a parameter as a matrix, so parameters are not cut. Dealing them out evenly
is then bin packing; taking them largest first and giving each to the rank that has least stays
within 4/3 of the best possible, and in a Transformer, whose parameters come in equal sizes by the
dozen, next to it. Largest first matters: small ones at the end fill what large ones left uneven.

The rule reads nothing but sizes and order, so all ranks find the same owners without talking.
"""

import heapq
from collections.abc import Iterable

from torch import Tensor


class Ownership:
    """The owner of each parameter, as parameters are added."""

    def __init__(self, world_size: int) -> None:
        self._owner: dict[Tensor, int] = {}
        self._load = [(0, rank) for rank in range(world_size)]

    def add(self, parameters: Iterable[Tensor]) -> None:
        """Deal out more parameters, on top of what ranks already have.

        Trainable ones go first: a frozen parameter has no optimizer state to balance.
        """
        largest_first = sorted(parameters, key=lambda p: (not p.requires_grad, -p.nbytes))
        for parameter in largest_first:
            load, rank = heapq.heappop(self._load)
            self._owner[parameter] = rank
            heapq.heappush(self._load, (load + parameter.nbytes, rank))

    def owner(self, parameter: Tensor) -> int:
        """The rank that keeps the state of a parameter."""
        return self._owner[parameter]

    def owned_by(self, rank: int) -> list[Tensor]:
        """The parameters of one rank, largest first as they were dealt out."""
        return [parameter for parameter, owner in self._owner.items() if owner == rank]

    @property
    def bytes_by_rank(self) -> list[int]:
        """What each rank keeps."""
        return [load for load, _ in sorted(self._load, key=lambda entry: entry[1])]
