"""Optimizer state scattered over ranks, gathered into the dictionary of one unsharded optimizer.

What a state holds is the optimizer's business: names, numbers and tensors, nested as it likes. So
an owner first sends a picture of its states, pickled, in which each large tensor is a placeholder,
and then the tensors themselves, each as itself. Pickling the tensors too would be shorter, and
would need a rank's whole state at once on the device that communicates.

Tensors arrive one at a time and go to host memory at once. A device that has room for its own part
of the state has none to spare for everyone's.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lmlab.parallel.collectives import Group, start_broadcast

States = dict[int, Any]
"""Index of a parameter to what the optimizer remembers about it."""


@dataclass(frozen=True)
class Placeholder:
    """Stands for a tensor that is sent by itself."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def gather_states(own: States, device: torch.device, group: Group) -> States:
    """The states of all ranks, tensors in host memory; every rank calls this and gets them all."""
    gathered: States = {}
    for source in range(dist.get_world_size(group)):
        sending = dist.get_rank(group) == source
        gathered |= _broadcast_states(own if sending else None, source, device, group)
    return dict(sorted(gathered.items()))


def _broadcast_states(
    own: States | None, source: int, device: torch.device, group: Group
) -> States:
    """One rank's states, everywhere; `own` is given on the rank that has them."""
    tensors = [] if own is None else [t for t in _tensors(own) if _travels_alone(t, device)]
    picture = [None if own is None else _replace(own, lambda t: _picture(t, device))]
    dist.broadcast_object_list(picture, group_src=source, group=group)
    waiting = iter(tensors)

    def receive(pictured: Tensor | Placeholder) -> Tensor:
        if isinstance(pictured, Tensor):
            return pictured
        tensor = next(waiting, None)
        if tensor is None:
            tensor = torch.empty(pictured.shape, dtype=pictured.dtype, device=device)
        start_broadcast(tensor.contiguous(), source, group).wait()
        return tensor.detach().to("cpu", copy=True)

    states: States = _replace(picture[0], receive)
    return states


def _travels_alone(tensor: Tensor, device: torch.device) -> bool:
    """Whether the group can carry it; step counters may live on the host beside a GPU's states."""
    return tensor.device == device and tensor.numel() > 1


def _picture(tensor: Tensor, device: torch.device) -> Tensor | Placeholder:
    """What stands for a tensor in the pickled message."""
    if _travels_alone(tensor, device):
        return Placeholder(tuple(tensor.shape), tensor.dtype)
    return tensor.detach().to("cpu", copy=True)


def _tensors(nested: Any) -> Iterator[Tensor]:
    """Tensors in the order in which `_replace` meets them."""
    found: list[Tensor] = []
    _replace(nested, found.append)
    return iter(found)


def _replace(nested: Any, replacement: Callable[[Any], Any]) -> Any:
    """A copy in which tensors and placeholders are what `replacement` makes of them."""
    if isinstance(nested, Tensor | Placeholder):
        return replacement(nested)
    if isinstance(nested, dict):
        return {key: _replace(value, replacement) for key, value in nested.items()}
    if isinstance(nested, list | tuple):
        return type(nested)(_replace(value, replacement) for value in nested)
    return nested
