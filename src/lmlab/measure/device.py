"""The device that a measurement runs on: selection, peak memory, threads, out-of-memory errors.

On a CPU the number of threads is part of the experiment. Workflow engines export OMP_NUM_THREADS=1
so that parallel jobs do not compete; a measurement job has the machine to itself and should use
every core that the scheduler grants, so `set_threads` overrides that.

Out-of-memory errors come in several forms: PyTorch's own class, a plain RuntimeError from the CPU
allocator, a driver error for allocations outside PyTorch's allocator (a cuBLAS handle, a kernel
image), and Python's MemoryError. A study records all of them with the same status.
"""

import os

import torch

DEVICE_NAMES = ("auto", "cuda", "cpu")

_OUT_OF_MEMORY_MESSAGES = (
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
)


class DeviceError(ValueError):
    """The requested device is unknown or not available."""


def torch_device(name: str) -> torch.device:
    """`auto` is the first CUDA GPU if there is one, else the CPU."""
    if name not in DEVICE_NAMES:
        raise DeviceError(f"device = {name!r}; allowed: {', '.join(DEVICE_NAMES)}")
    if name == "cpu":
        return torch.device("cpu")
    # CUDA orders GPUs by speed, NVML by bus. Set before CUDA is initialized, this makes CUDA follow
    # NVML, so that the measured GPU is the one the machine is named after.
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    if torch.cuda.is_available():
        return torch.device("cuda", 0)
    if name == "cuda":
        raise DeviceError("device = 'cuda', but PyTorch finds no CUDA GPU here; allowed: cpu")
    return torch.device("cpu")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether PyTorch or Python ran out of memory."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    message = str(error)
    return isinstance(error, RuntimeError) and any(m in message for m in _OUT_OF_MEMORY_MESSAGES)


def reset_peak_memory(device: torch.device) -> None:
    """Reset the peak to the bytes allocated now; a no-op on a CPU."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_memory_bytes(device: torch.device) -> int | None:
    """Peak bytes in tensors since the last reset; None on a CPU, which has no counter."""
    return int(torch.cuda.max_memory_allocated(device)) if device.type == "cuda" else None


def usable_cores() -> int:
    """Cores that this process may run on; in a container possibly fewer than the machine has."""
    return len(os.sched_getaffinity(0))


def set_threads() -> int:
    """Let PyTorch use every usable core despite OMP_NUM_THREADS; returns their number."""
    cores = usable_cores()
    torch.set_num_threads(cores)
    return cores
