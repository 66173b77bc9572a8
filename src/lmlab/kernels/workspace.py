"""Semaphores that count the finished splits of a tile and order the fused backward's dQ additions.

Every launch leaves its semaphores at zero for the next one, so they live as long as the process and
need no launch to clear them. Launches that use them never overlap on one stream, so each has one
set. A launch captured into a graph may later run concurrently with anything, so it gets counters of
its own: from a reserve or, once that is used up, allocated and cleared inside the graph.
"""

import torch
from torch import Tensor

_COUNT = 65536
"""Enough for any problem small enough to be split, and for 256 heads of 16384 queries."""
_RESERVE = 2**21

_semaphores: dict[tuple[torch.device, int], Tensor] = {}
_reserves: dict[torch.device, Tensor] = {}


def semaphores(count: int, device: torch.device) -> Tensor:
    """At least `count` counters at zero; a launch leaves them at zero again."""
    if device.type != "cuda" or count > _COUNT:
        return torch.zeros(count, dtype=torch.int32, device=device)
    if torch.cuda.is_current_stream_capturing():
        reserve = _reserves.get(device)
        if reserve is None or len(reserve) < count:
            return torch.zeros(count, dtype=torch.int32, device=device)
        rest = (count + 3) // 4 * 4  # pointers stay aligned to 16 bytes
        taken, _reserves[device] = reserve[:count], reserve[rest:]
        return taken
    key = device, torch._C._cuda_getCurrentRawStream(device.index)
    if key not in _semaphores:
        # Allocated now, because memory allocated during a capture belongs to the graph.
        _reserves.setdefault(device, torch.zeros(_RESERVE, dtype=torch.int32, device=device))
        _semaphores[key] = torch.zeros(_COUNT, dtype=torch.int32, device=device)
    return _semaphores[key]
