"""Memory through which the programs that share the walk of a tile find each other.

Each leaves what it has: forward its part of the softmax, backward its sums. The last of them to
arrive adds all up; it knows itself to be the last from a counter, and sets that back to zero for
the launch after. So the counters live as long as the process, and no launch is spent on clearing
them. Launches on one stream never overlap, hence one set of counters a stream. A launch that is
captured into a graph may run later beside anything, so it gets counters of its own, cleared inside
the graph.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lmlab.kernels.problem import Plan

_COUNTERS = 65536
"""Enough for any problem small enough to be split, and for 256 heads of 16384 queries."""

_counters: dict[tuple[torch.device, int], Tensor] = {}


def parts(plan: Plan, kept: int, block_d: int, device: torch.device) -> Tensor:
    """Room for each program's tile, the sums of its weights and their peaks."""
    return torch.empty(plan.programs * kept * (block_d + 2), dtype=torch.float32, device=device)


def sums(plan: Plan, kept: int, block_d: int, device: torch.device) -> Tensor:
    """Room for each program's sums of a backward pass: two tiles, for keys and for values."""
    return torch.empty(2 * plan.programs * kept * block_d, dtype=torch.float32, device=device)


def counters(count: int, device: torch.device) -> Tensor:
    """Counters at zero, at least as many as asked for; a launch leaves them at zero again."""
    if device.type != "cuda" or count > _COUNTERS or torch.cuda.is_current_stream_capturing():
        return torch.zeros(count, dtype=torch.int32, device=device)
    key = device, torch.cuda.current_stream(device).cuda_stream
    if key not in _counters:
        _counters[key] = torch.zeros(_COUNTERS, dtype=torch.int32, device=device)
    return _counters[key]
