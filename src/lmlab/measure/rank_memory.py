"""Memory of a rank at one moment: in tensors, in the allocator, on the device.

The three differ and each is true. *Allocated* is the bytes of live tensors. *Reserved* is what the
allocator has taken from the device and keeps for the next tensor, so it follows the peak and does
not fall. The *device* also counts memory outside the allocator: the CUDA context, libraries,
communication buffers. It can therefore rise in a step in which allocated memory falls.

Two ranks on one GPU are two processes. NVML separates them if it can; in a container it often
cannot, and then only the device's total is known; the reading's `scope` records which.

A CPU has no counter of tensors. There the known tensors are counted, each storage once, and the
device's view is the process's resident memory.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import psutil
import torch
from torch import Tensor

from lmlab.measure.clock import synchronize
from lmlab.measure.nvml import nvml_session, query, visible_gpu

Parts = Mapping[str, Iterable[Tensor]]
"""Tensors by purpose."""


def storage_bytes(tensors: Iterable[Tensor], device: torch.device) -> int:
    """Bytes of the tensors' storages on this kind of device, shared storages counted once."""
    storages = {}
    for tensor in map(_local, tensors):
        if tensor.device.type == device.type:  # optimizers keep step counters on the host
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def _local(tensor: Tensor) -> Tensor:
    """This rank's part of a distributed tensor."""
    to_local = getattr(tensor, "to_local", None)
    return to_local() if callable(to_local) else tensor


def optimizer_tensors(state: Mapping[Any, Any]) -> Iterator[Tensor]:
    """The tensors in an optimizer's state."""
    for entry in state.values():
        for value in entry.values() if isinstance(entry, Mapping) else ():
            if isinstance(value, Tensor):
                yield value


def gradients(parameters: Iterable[Tensor]) -> Iterator[Tensor]:
    """The gradients that exist."""
    return (p.grad for p in parameters if p.grad is not None)


class SavedActivations:
    """Bytes that autograd saves for backward, without parameters and given other tensors."""

    def __init__(self, excluded: Iterable[Tensor]) -> None:
        self._storages: dict[int, int] = {}
        self._excluded = {tensor.untyped_storage().data_ptr() for tensor in excluded}

    @property
    def nbytes(self) -> int:
        return sum(self._storages.values())

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count what a forward pass in the block saves; read `nbytes` while its graph is alive."""
        with torch.autograd.graph.saved_tensors_hooks(self._count, lambda tensor: tensor):
            yield

    def _count(self, tensor: Tensor) -> Tensor:
        base = tensor if tensor._base is None else tensor._base
        storage = tensor.untyped_storage()
        is_parameter = base.is_leaf and base.requires_grad
        if not is_parameter and storage.data_ptr() not in self._excluded:
            self._storages[storage.data_ptr()] = storage.nbytes()
        return tensor


def read_memory(device: torch.device, parts: Parts, *, activations: int = 0) -> dict[str, Any]:
    """Bytes used by this rank now: by part, allocated, reserved, and as the device reports it."""
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
