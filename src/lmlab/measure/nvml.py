"""GPU discovery through NVML, the driver's management library, without a CUDA context.

NVML answers within milliseconds, and a process that has only used NVML may still fork. On a machine
without a driver the library is missing, which means "no GPU" and is not an error.

NVML lists every GPU of the machine; a program sees those that CUDA_VISIBLE_DEVICES selects, by
CUDA's own rules: a comma-separated list of indices or of UUIDs (or unique prefixes), cut off at the
first entry that matches no GPU; an empty list hides all. Indices are in PCI bus order; CUDA orders
by speed unless CUDA_DEVICE_ORDER is PCI_BUS_ID, which `device.torch_device` therefore sets.
"""

import importlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import takewhile
from typing import Any


@dataclass(frozen=True)
class VisibleGpu:
    """A GPU that a program started now would see."""

    handle: Any
    name: str
    uuid: str


@contextmanager
def nvml_session() -> Iterator[Any | None]:
    """NVML initialized for the block, or None without a driver."""
    nvml: Any = importlib.import_module("pynvml")  # lazy: takes 30 ms, and few importers need it
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        yield None
        return
    try:
        yield nvml
    finally:
        nvml.nvmlShutdown()


def query(nvml: Any, function: Callable[..., Any], *arguments: Any) -> Any:
    """The answer, or None if this GPU or driver does not support the query."""
    try:
        return function(*arguments)
    except nvml.NVMLError:
        return None


def visible_gpus(nvml: Any, visible: str | None) -> list[VisibleGpu]:
    """The GPUs that CUDA_VISIBLE_DEVICES=`visible` selects, in its order; None means unset."""
    handles = map(nvml.nvmlDeviceGetHandleByIndex, range(nvml.nvmlDeviceGetCount()))
    gpus = [_describe(nvml, handle) for handle in handles]
    if visible is None:
        return gpus
    selected = (_selected(nvml, gpus, entry.strip()) for entry in visible.split(","))
    return [gpu for gpu in takewhile(bool, selected) if gpu]


def visible_gpu(nvml: Any | None, index: int) -> VisibleGpu | None:
    """The GPU that PyTorch calls `cuda:<index>` in this environment; None if NVML lacks it."""
    if nvml is None:
        return None
    # A lost GPU fails every query; whatever was running on it reports the loss.
    gpus = query(nvml, visible_gpus, nvml, os.environ.get("CUDA_VISIBLE_DEVICES")) or []
    return gpus[index] if index < len(gpus) else None


def driver_version(nvml: Any) -> str:
    return _text(nvml.nvmlSystemGetDriverVersion())


def _describe(nvml: Any, handle: Any) -> VisibleGpu:
    name, uuid = nvml.nvmlDeviceGetName(handle), nvml.nvmlDeviceGetUUID(handle)
    return VisibleGpu(handle, _text(name), _text(uuid))


def _selected(nvml: Any, gpus: list[VisibleGpu], entry: str) -> VisibleGpu | None:
    """The GPU that one entry of CUDA_VISIBLE_DEVICES selects, if any."""
    if entry.isdecimal():
        return gpus[int(entry)] if int(entry) < len(gpus) else None
    if entry.startswith("MIG-"):  # a slice is not listed among the whole GPUs
        handle = query(nvml, nvml.nvmlDeviceGetHandleByUUID, entry)
        return None if handle is None else _describe(nvml, handle)
    matching = [gpu for gpu in gpus if entry and gpu.uuid.startswith(entry)]
    return matching[0] if len(matching) == 1 else None


def _text(value: str | bytes) -> str:
    """Older bindings return bytes."""
    return value.decode() if isinstance(value, bytes) else value
