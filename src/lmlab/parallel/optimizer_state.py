"""Gathers sharded optimizer state into the state of one unsharded optimizer.

Each rank in turn broadcasts its states, pickled, with meta tensors in place of the large tensors,
and then the large tensors one by one. Pickling everything would take a rank's whole state a second
time on the device. For the same reason each tensor goes to host memory as soon as it arrives.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_map_only

from lmlab.parallel.collectives import Group, start_broadcast

States = dict[int, Any]
"""Optimizer state by parameter index."""


def gather_states(own: States, device: torch.device, group: Group) -> States:
    """The states of all ranks, with tensors in host memory; all ranks call this together."""
    gathered: States = {}
    for source in range(dist.get_world_size(group)):
        sends = dist.get_rank(group) == source
        gathered |= _broadcast_states(own if sends else None, source, device, group)
    return dict(sorted(gathered.items()))


def _broadcast_states(
    own: States | None, source: int, device: torch.device, group: Group
) -> States:
    """The states of one rank on all ranks; `own` is None on the others."""
    large: list[Tensor] = []

    def to_pickle(tensor: Tensor) -> Tensor:
        # Step counters are small, and may be on the host while the rest is on a GPU.
        if tensor.device != device or tensor.numel() <= 1:
            return tensor.detach().to("cpu", copy=True)
        large.append(tensor)
        return tensor.detach().to("meta")

    pickled = [None if own is None else tree_map_only(Tensor, to_pickle, own)]
    dist.broadcast_object_list(pickled, group_src=source, group=group)
    outgoing = iter(large)

    def receive(tensor: Tensor) -> Tensor:
        if not tensor.is_meta:
            return tensor
        buffer = torch.empty_like(tensor, device=device) if own is None else next(outgoing)
        start_broadcast(buffer.contiguous(), source, group).wait()
        return buffer.detach().to("cpu", copy=True)

    states: States = tree_map_only(Tensor, receive, pickled[0])
    return states
