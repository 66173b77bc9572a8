"""How much memory a rank holds at one moment: counted in tensors, kept by the allocator, as the
device reports it.

The three differ and each is true. *Allocated* are bytes of living tensors. *Reserved* is what the
allocator has taken from the device and keeps for the next tensor, so it rises with the highest
moment and does not fall with the lowest. The *device* also counts what is not the allocator's: the
CUDA context, libraries, buffers of a communication library. Hence the last can rise in a step in
which the first falls.

Two ranks on one GPU are two processes on it. NVML tells them apart where it may; in a container it
often may not, and then the device's total is all there is, and the reading says so.

A CPU has no counter of tensors. There bytes are counted by walking the tensors that are known, each
storage once, and the device's own view is the process's resident memory.
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
from lmlab.measure.nvml import nvml_session, visible_gpu

Parts = Mapping[str, Iterable[Tensor]]
"""Tensors by what they are for."""


def storage_bytes(tensors: Iterable[Tensor], device: torch.device) -> int:
    """Bytes behind some tensors on a kind of device, those that share memory counted once."""
    storages = {}
    for tensor in map(_local, tensors):
        if tensor.device.type == device.type:  # an optimizer counts its steps on the host
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def _local(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor that is spread over ranks."""
    local = getattr(tensor, "to_local", None)
    return local() if callable(local) else tensor


def optimizer_tensors(state: Mapping[Any, Any]) -> Iterator[Tensor]:
    """The tensors that an optimizer remembers."""
    for entry in state.values():
        for value in entry.values() if isinstance(entry, Mapping) else ():
            if isinstance(value, Tensor):
                yield value


def gradients(parameters: Iterable[Tensor]) -> Iterator[Tensor]:
    """The gradients that there are."""
    return (p.grad for p in parameters if p.grad is not None)


class Saved:
    """Bytes that autograd keeps for backward, without parameters and what is counted elsewhere."""

    def __init__(self, counted_elsewhere: Iterable[Tensor]) -> None:
        self._storages: dict[int, int] = {}
        self._elsewhere = {tensor.untyped_storage().data_ptr() for tensor in counted_elsewhere}

    @property
    def nbytes(self) -> int:
        return sum(self._storages.values())

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count what a forward pass in the block saves; it must be alive when `nbytes` is read."""
        with torch.autograd.graph.saved_tensors_hooks(self._note, lambda tensor: tensor):
            yield

    def _note(self, tensor: Tensor) -> Tensor:
        base = tensor if tensor._base is None else tensor._base
        storage = tensor.untyped_storage()
        is_parameter = base.is_leaf and base.requires_grad
        if not is_parameter and storage.data_ptr() not in self._elsewhere:
            self._storages[storage.data_ptr()] = storage.nbytes()
        return tensor


def read_memory(device: torch.device, parts: Parts, *, activations: int = 0) -> dict[str, Any]:
    """Bytes of this rank now: by part, allocated, reserved, and as the device reports it."""
    synchronize(device)
    counted = {name: storage_bytes(tensors, device) for name, tensors in parts.items()}
    counted["activations"] = activations
    known = sum(counted.values())
    allocated = torch.cuda.memory_allocated(device) if device.type == "cuda" else known
    reported, scope = device_bytes(device)
    return {
        "allocated_bytes": allocated,
        "reserved_bytes": torch.cuda.memory_reserved(device) if device.type == "cuda" else None,
        "device_bytes": reported,
        "device_scope": scope,
        "parts_bytes": {**counted, "other": allocated - known},
    }


def device_bytes(device: torch.device) -> tuple[int, str]:
    """What the device says is in use, and of whom: this process, or all that are on it."""
    if device.type != "cuda":
        return int(psutil.Process().memory_info().rss), "process"
    own = _own_bytes(device.index or 0)
    if own is not None:
        return own, "process"
    free, total = torch.cuda.mem_get_info(device)
    return int(total - free), "device"


def _own_bytes(index: int) -> int | None:
    """This process's bytes by NVML; None where it does not tell processes apart."""
    with nvml_session() as nvml:
        gpu = visible_gpu(nvml, index)
        if nvml is None or gpu is None:
            return None
        try:
            processes = nvml.nvmlDeviceGetComputeRunningProcesses(gpu.handle)
        except nvml.NVMLError:
            return None
        return own_bytes(processes, os.getpid())


def own_bytes(processes: Iterable[Any], pid: int) -> int | None:
    """The memory of the process with this number among those that a GPU lists."""
    for process in processes:
        if process.pid == pid and process.usedGpuMemory:
            return int(process.usedGpuMemory)
    return None
