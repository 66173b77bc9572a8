"""Workspace through which programs that share one tile exchange partial results.

Each split stores its partial result: softmax state in the forward, gradient sums in the backward.
The last to arrive, known from a semaphore, merges them and resets the semaphore for the next
launch. So semaphores live as long as the process and no launch is spent on clearing them. Launches
on one stream never overlap, hence one set per stream. A launch captured into a graph may later run
concurrently with anything, so it gets separate semaphores, cleared inside the graph.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lmlab.kernels.problem import Plan

_COUNT = 65536
"""Enough for any problem small enough to be split, and for 256 heads of 16384 queries."""

_semaphores: dict[tuple[torch.device, int], Tensor] = {}


def split_workspace(
    plan: Plan, elements: int, device: torch.device, unused: Tensor
) -> tuple[Tensor, Tensor]:
    """Partials of `elements` fp32 numbers per program, and semaphores; `unused` without splits."""
    if plan.splits == 1:
        return unused, unused
    partials = torch.empty(plan.programs * elements, dtype=torch.float32, device=device)
    return partials, semaphores(plan.programs // plan.splits, device)


def semaphores(count: int, device: torch.device) -> Tensor:
    """At least `count` counters at zero; a launch leaves them at zero again."""
    if device.type != "cuda" or count > _COUNT or torch.cuda.is_current_stream_capturing():
        return torch.zeros(count, dtype=torch.int32, device=device)
    key = device, torch.cuda.current_stream(device).cuda_stream
    if key not in _semaphores:
        _semaphores[key] = torch.zeros(_COUNT, dtype=torch.int32, device=device)
    return _semaphores[key]
