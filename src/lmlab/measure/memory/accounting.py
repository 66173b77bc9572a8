"""Memory at one moment, layer by layer: from what nvidia-smi shows to what tensors request.

nvidia-smi and `memory_allocated` differ by gigabytes, and each layer in between has a reason:

    used on the device   all processes, as the driver counts it
    - outside PyTorch    CUDA context, kernel images, libraries such as NCCL: in no snapshot
    = reserved           what PyTorch's allocator took from the driver and keeps
    - cached             free inside the allocator, ready for the next tensor; part of it in splits
                         that only sufficiently small tensors can use
    = allocated          blocks that hold tensors
    - rounding           block sizes minus requested sizes
    = requested          bytes of tensors

Reserved memory follows the peak and does not fall, so a device can show more in a step whose
tensors take less. Two ranks on one GPU are two processes. NVML usually separates them; in a
container it often cannot, and then only the device's total is known (`device_scope`). A CPU has no
such layers, only the process's resident memory and the known tensors.
"""

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import Tensor

from lmlab.measure.clock import synchronize
from lmlab.measure.nvml import nvml_session, query, visible_gpu

COUNTERS = {
    f"{prefix}{name}_bytes": f"{name}_bytes.all.{which}"
    for prefix, which in (("", "current"), ("peak_", "peak"))
    for name in ("reserved", "allocated", "requested", "inactive_split")
} | {"alloc_retries": "num_alloc_retries"}
"""Name here -> key of torch.cuda.memory_stats()."""


def account(device: torch.device) -> dict[str, Any]:
    """Every layer at this moment; a GPU's peaks are since their last reset."""
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


def nvidia_smi_used_bytes(index: int) -> int | None:
    """Used bytes of the whole GPU, from NVML; None if it does not report them."""
    with nvml_session() as nvml:
        gpu = visible_gpu(nvml, index)
        if nvml is None or gpu is None:
            return None
        memory = query(nvml, nvml.nvmlDeviceGetMemoryInfo, gpu.handle)
        return None if memory is None else int(memory.used)


def uses_nccl() -> bool:
    """Whether the default process group uses NCCL."""
    return dist.is_available() and dist.is_initialized() and "nccl" in dist.get_backend()


def read_memory(
    device: torch.device, parts: Mapping[str, Iterable[Tensor]], *, activations: int = 0
) -> dict[str, Any]:
    """This rank's current memory: by part (tensors by purpose), allocated, reserved, and as the
    device reports it."""
    synchronize(device)
    counted = {name: storage_bytes(tensors, device) for name, tensors in parts.items()}
    counted["activations"] = activations
    known = sum(counted.values())
    on_gpu = device.type == "cuda"
    allocated = torch.cuda.memory_allocated(device) if on_gpu else known
    reported, scope = device_bytes(device)
    return {
        "allocated_bytes": allocated,
        "reserved_bytes": torch.cuda.memory_reserved(device) if on_gpu else None,
        "device_bytes": reported,
        "device_scope": scope,
        "parts_bytes": {**counted, "other": allocated - known},
    }


def device_bytes(device: torch.device) -> tuple[int, str]:
    """Memory in use as the device reports it, and its scope: this process, or the whole device."""
    if device.type != "cuda":
        return int(psutil.Process().memory_info().rss), "process"
    with nvml_session() as nvml:
        gpu = visible_gpu(nvml, device.index or 0)
        own = None if gpu is None else process_bytes(nvml, gpu.handle, os.getpid())
    if own is not None:
        return own, "process"
    free, total = torch.cuda.mem_get_info(device)
    return int(total - free), "device"


def process_bytes(nvml: Any, handle: Any, pid: int) -> int | None:
    """A process's memory on a GPU; None if NVML does not list it."""
    for process in query(nvml, nvml.nvmlDeviceGetComputeRunningProcesses, handle) or ():
        if process.pid == pid and process.usedGpuMemory:
            return int(process.usedGpuMemory)
    return None


def storage_bytes(tensors: Iterable[Tensor], device: torch.device) -> int:
    """Bytes of the tensors' storages on this kind of device, shared storages counted once."""
    storages = {}
    for tensor in tensors:
        to_local = getattr(tensor, "to_local", None)  # this rank's part of a distributed tensor
        local = to_local() if callable(to_local) else tensor
        if local.device.type == device.type:  # optimizers keep step counters on the host
            storage = local.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def optimizer_tensors(state: Mapping[Any, Any]) -> Iterator[Tensor]:
    """The tensors in an optimizer's state."""
    for entry in state.values():
        for value in entry.values() if isinstance(entry, Mapping) else ():
            if isinstance(value, Tensor):
                yield value


def gradients(parameters: Iterable[Tensor]) -> Iterator[Tensor]:
    """The gradients of the parameters that have one."""
    return (p.grad for p in parameters if p.grad is not None)


@contextmanager
def counting_saved(excluded: Iterable[Tensor]) -> Iterator[dict[int, int]]:
    """Collect the bytes, by storage address, that a forward pass in the block saves for backward,
    without parameters and the excluded tensors."""
    known = {tensor.untyped_storage().data_ptr() for tensor in excluded}
    saved: dict[int, int] = {}

    def count(tensor: Tensor) -> Tensor:
        base = tensor if tensor._base is None else tensor._base
        storage = tensor.untyped_storage()
        is_parameter = base.is_leaf and base.requires_grad
        if not is_parameter and storage.data_ptr() not in known:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        yield saved
