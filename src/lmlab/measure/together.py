"""What a measurement asks of the other ranks: numbers from all of them, decisions made together.

Every rank of a job runs the same program, so whatever depends on a clock or on free memory (has
the time run out, does a size fit) must be decided once for all: a rank that goes on alone waits for
ever in its next collective. Values travel as pickled objects; none of this runs while a clock does.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable
from math import inf, isnan
from typing import Any, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")


def from_all_ranks(value: T) -> list[T]:
    """What each rank hands in, in order of ranks; everybody gets the list."""
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, value)
    return gathered


def largest(value: float) -> float:
    """The largest of all ranks' values: a decision on it is the same everywhere."""
    return max(from_all_ranks(value))


def smallest(value: float) -> float:
    """The smallest of all ranks' values."""
    return min(from_all_ranks(value))


def worst(errors: Iterable[float]) -> float:
    """The largest error; one that is not a number is infinite, where `max` would pass it over."""
    return max((inf if isnan(error) else error for error in errors), default=0.0)


def ranks_on_one_device(device: torch.device) -> int:
    """How many ranks share the fullest device; those on one host share its CPU."""
    places = from_all_ranks((socket.gethostname(), str(device)))
    return max(places.count(place) for place in places)
