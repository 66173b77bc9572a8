"""What a pass of attention holds in GPU memory, and what it costs the host to launch.

Memory is that of this problem alone: its tensors and what a variant allocates on top. Host time
ends when the call returns, while the GPU still works: where it exceeds the GPU's time, launching
sets the pace. It is taken after the device is idle, so that a full queue does not count.
"""

from __future__ import annotations

import statistics
import time

import torch
from torch import Tensor

from lmlab.chapters.attention.measure.problem import Attend, Problem
from lmlab.chapters.attention.measure.variants import Variants
from lmlab.measure.clock import synchronize
from lmlab.measure.device import peak_memory_bytes, reset_peak_memory

MOST_CALLS, LONGEST_S = 10, 0.05


def note_memory(
    variants: Variants, name: str, attend: Attend, problem: Problem, device: torch.device
) -> None:
    """Record `memory` of a variant by stage; nothing on a CPU, which has no such statistics."""
    if device.type == "cuda":
        for stage, held in memory_stages(attend, problem, device).items():
            variants.note(name, "memory", held, "B", stage=stage)


def memory_stages(attend: Attend, problem: Problem, device: torch.device) -> dict[str, int]:
    """Peak of forward, what forward leaves, and the peak of both; of this problem's tensors."""
    torch.cuda.synchronize(device)
    others = int(torch.cuda.memory_allocated(device)) - _bytes(*problem.inputs, problem.grad_o)
    reset_peak_memory(device)
    output = attend(*problem.inputs)
    forward = peak_memory_bytes(device) or 0
    held = int(torch.cuda.memory_allocated(device))
    problem.gradients(output)
    found = {
        "forward_peak": forward,
        "before_backward": held,
        "peak": peak_memory_bytes(device) or 0,
    }
    return {stage: count - others for stage, count in found.items()}


def _bytes(*tensors: Tensor) -> int:
    return sum(x.numel() * x.element_size() for x in tensors)


def note_host_time(
    variants: Variants, name: str, attend: Attend, problem: Problem, device: torch.device
) -> None:
    """Record `host_time` of a variant by pass; nothing on a CPU, where the host does the work."""
    if device.type != "cuda":
        return
    for phase, prepare in problem.passes().items():
        call = prepare(attend)
        call()
        times: list[float] = []
        while len(times) < MOST_CALLS and sum(times) < LONGEST_S:
            synchronize(device)
            before = time.perf_counter()
            call()
            times.append(time.perf_counter() - before)
        synchronize(device)
        variants.note(name, "host_time", 1e3 * statistics.median(times), "ms", phase=phase)
