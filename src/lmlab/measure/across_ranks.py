"""Gather values from all ranks, so that every rank makes the same decision.

Every rank runs the same program, so anything that depends on a clock or on free memory (is the time
up, does a size fit) must be decided once for all ranks: a rank that decides alone would block
forever in its next collective. Values are sent as pickled objects; never call this while timing.
"""

import socket
from collections.abc import Iterable
from math import inf, isnan
from typing import Any, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")


def gather(value: T) -> list[T]:
    """All-gather one value per rank, in rank order."""
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, value)
    return gathered


def max_over_ranks(value: float) -> float:
    return max(gather(value))


def min_over_ranks(value: float) -> float:
    return min(gather(value))


def max_error(errors: Iterable[float]) -> float:
    """The largest error; NaN counts as infinite, because `max` can miss it."""
    return max((inf if isnan(error) else error for error in errors), default=0.0)


def ranks_per_device(device: torch.device) -> int:
    """The largest number of ranks on any one device; a host's CPU counts as one device."""
    places = gather((socket.gethostname(), str(device)))
    return max(places.count(place) for place in places)
