"""From what nvidia-smi shows to what tensors ask for.

nvidia-smi and `memory_allocated` differ by gigabytes, and each step between them has a reason:

    used on the device   everybody's memory, as the driver counts it
    - outside PyTorch    the CUDA context, kernel images, libraries such as NCCL: in no snapshot
    = reserved           what PyTorch's allocator took from the driver and keeps
    - cached             free inside the allocator, ready for the next tensor; a part of it cut into
                         splits that only tensors small enough can use
    = allocated          blocks that tensors live in
    - rounding           block sizes against what was asked for
    = requested          bytes of tensors

On a CPU there are no such layers: what the process occupies, and the tensors in it.
"""

from __future__ import annotations

from typing import Any

import psutil
import torch

from lmlab.measure.nvml import nvml_session, visible_gpu

COUNTERS = {
    "reserved_bytes": "reserved_bytes.all.current",
    "allocated_bytes": "allocated_bytes.all.current",
    "requested_bytes": "requested_bytes.all.current",
    "inactive_split_bytes": "inactive_split_bytes.all.current",
    "peak_reserved_bytes": "reserved_bytes.all.peak",
    "peak_allocated_bytes": "allocated_bytes.all.peak",
    "peak_requested_bytes": "requested_bytes.all.peak",
    "peak_inactive_split_bytes": "inactive_split_bytes.all.peak",
    "alloc_retries": "num_alloc_retries",
}


def account(device: torch.device) -> dict[str, Any]:
    """Every layer as it is now; a GPU's peaks are those since their last reset."""
    if device.type != "cuda":
        return {"resident_bytes": int(psutil.Process().memory_info().rss)}
    free, total = torch.cuda.mem_get_info(device)
    stats = torch.cuda.memory_stats(device)
    counters = {name: _count(stats.get(key)) for name, key in COUNTERS.items()}
    used = int(total - free)
    return {
        "device_total_bytes": int(total),
        "device_used_bytes": used,
        "nvidia_smi_used_bytes": nvidia_smi_used_bytes(device.index or 0),
        "outside_pytorch_bytes": used - int(torch.cuda.memory_reserved(device)),
        "nccl_is_running": uses_nccl(),
        **counters,
    }


def nvidia_smi_used_bytes(index: int, nvml: Any = None) -> int | None:
    """What the driver reports for the whole GPU; None where it does not."""
    with nvml_session(nvml) as session:
        gpu = visible_gpu(session, index)
        if session is None or gpu is None:
            return None
        try:
            return int(session.nvmlDeviceGetMemoryInfo(gpu.handle).used)
        except session.NVMLError:
            return None


def uses_nccl() -> bool:
    """Whether NCCL holds buffers in this process."""
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()):
        return False
    return "nccl" in str(distributed.get_backend())


def _count(value: Any) -> int | None:
    return None if value is None else int(value)
