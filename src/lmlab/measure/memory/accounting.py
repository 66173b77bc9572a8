"""From what nvidia-smi shows to what tensors request.

nvidia-smi and `memory_allocated` differ by gigabytes, and each step between them has a reason:

    used on the device   all processes, as the driver counts it
    - outside PyTorch    CUDA context, kernel images, libraries such as NCCL: in no snapshot
    = reserved           what PyTorch's allocator took from the driver and keeps
    - cached             free inside the allocator, ready for the next tensor; part of it in splits
                         that only sufficiently small tensors can use
    = allocated          blocks that hold tensors
    - rounding           block sizes minus requested sizes
    = requested          bytes of tensors

On a CPU there are no such layers, only the process's resident memory and the tensors in it.
"""

from __future__ import annotations

from typing import Any

import psutil
import torch

from lmlab.measure.nvml import nvml_session, query, visible_gpu

COUNTERS = {
    f"{prefix}{name}_bytes": f"{name}_bytes.all.{which}"
    for prefix, which in (("", "current"), ("peak_", "peak"))
    for name in ("reserved", "allocated", "requested", "inactive_split")
} | {"alloc_retries": "num_alloc_retries"}
"""Name here -> key of torch.cuda.memory_stats()."""


def account(device: torch.device) -> dict[str, Any]:
    """Every layer now; a GPU's peaks are those since their last reset."""
    if device.type != "cuda":
        return {"resident_bytes": int(psutil.Process().memory_info().rss)}
    free, total = torch.cuda.mem_get_info(device)
    stats = torch.cuda.memory_stats(device)
    used = int(total - free)
    return {
        "device_total_bytes": int(total),
        "device_used_bytes": used,
        "nvidia_smi_used_bytes": nvidia_smi_used_bytes(device.index or 0),
        "outside_pytorch_bytes": used - int(torch.cuda.memory_reserved(device)),
        "nccl_is_running": uses_nccl(),
        **{name: stats.get(key) for name, key in COUNTERS.items()},
    }


def nvidia_smi_used_bytes(index: int, nvml: Any = None) -> int | None:
    """What the driver reports for the whole GPU; None if it does not."""
    with nvml_session(nvml) as session:
        gpu = visible_gpu(session, index)
        if session is None or gpu is None:
            return None
        memory = query(session, session.nvmlDeviceGetMemoryInfo, gpu.handle)
        return None if memory is None else int(memory.used)


def uses_nccl() -> bool:
    """Whether NCCL holds buffers in this process."""
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()):
        return False
    return "nccl" in str(distributed.get_backend())
