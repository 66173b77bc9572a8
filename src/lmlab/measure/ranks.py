"""What a measurement asks of the other ranks: numbers from all of them, decisions made together.

Every rank of a job runs the same program, so whatever depends on a clock or on free memory (has
the time run out, does a size fit) must be decided once for all: a rank that goes on alone waits for
ever in its next collective. Values travel as pickled objects; none of this runs while a clock does.

The process group says what a table may claim: backend, number of ranks, and whether ranks share a
device, which makes their times those of a shared device and not of a cluster.
"""

from __future__ import annotations

import socket
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


def describe_group(device: torch.device) -> dict[str, Any]:
    """Backend, ranks and their devices, as the group itself has them."""
    places = from_all_ranks((socket.gethostname(), _device_id(device)))
    return {
        "backend": dist.get_backend(),
        "world_size": dist.get_world_size(),
        "devices": [name for _, name in places],
        "hosts": len({host for host, _ in places}),
        "ranks_per_device": max(places.count(place) for place in places),
        "shared": device.type == "cuda" and len(set(places)) < len(places),
    }


def _device_id(device: torch.device) -> str:
    """A GPU by its number, a CPU rank by its host: ranks on one host share its cores."""
    return device.type if device.type == "cpu" else f"cuda:{device.index or 0}"
