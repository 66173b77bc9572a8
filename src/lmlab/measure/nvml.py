"""NVML, the driver's own book-keeping, asked without waking CUDA.

NVML answers which GPUs there are, how warm and how fast they run and who uses them, without
creating a CUDA context: it costs milliseconds, and a process that has only asked NVML may still
fork. On a machine without a driver the library is missing; that is an answer ("no GPU"), not an
error.

NVML knows every GPU of the machine, a program sees those that CUDA_VISIBLE_DEVICES lets through,
so that variable is read here by CUDA's own rules: a comma-separated list of indices or of
(beginnings of) UUIDs, cut off at the first entry that names no GPU; an empty list hides all.
Indices are taken in PCI bus order, NVML's own; CUDA numbers by speed unless CUDA_DEVICE_ORDER
says PCI_BUS_ID, which `device.torch_device` therefore asks for.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class VisibleGpu:
    """One GPU that a program started now would see."""

    handle: Any
    name: str
    uuid: str


@contextmanager
def nvml_session(nvml: Any = None) -> Iterator[Any | None]:
    """NVML opened for the block, or None where there is no driver; `nvml` stands in for pynvml."""
    if nvml is None:
        nvml = importlib.import_module("pynvml")  # not above: 30 ms that few imports of us need
    try:
        nvml.nvmlInit()
        opened = True
    except nvml.NVMLError:
        opened = False
    try:
        yield nvml if opened else None
    finally:
        if opened:
            nvml.nvmlShutdown()


def visible_gpus(nvml: Any, visible: str | None) -> list[VisibleGpu]:
    """The GPUs that CUDA_VISIBLE_DEVICES=`visible` lets through, in its order; None: unset."""
    gpus = [_gpu(nvml, index) for index in range(nvml.nvmlDeviceGetCount())]
    if visible is None:
        return gpus
    chosen: list[VisibleGpu] = []
    for entry in visible.split(","):
        gpu = _named(nvml, gpus, entry.strip())
        if gpu is None:
            break
        chosen.append(gpu)
    return chosen


def visible_gpu(nvml: Any | None, index: int) -> VisibleGpu | None:
    """The GPU that PyTorch calls `cuda:<index>` in this environment; None when NVML lacks it."""
    if nvml is None:
        return None
    gpus = visible_gpus(nvml, os.environ.get("CUDA_VISIBLE_DEVICES"))
    return gpus[index] if index < len(gpus) else None


def driver_version(nvml: Any) -> str:
    return _text(nvml.nvmlSystemGetDriverVersion())


def _gpu(nvml: Any, index: int) -> VisibleGpu:
    return _describe(nvml, nvml.nvmlDeviceGetHandleByIndex(index))


def _describe(nvml: Any, handle: Any) -> VisibleGpu:
    return VisibleGpu(
        handle, _text(nvml.nvmlDeviceGetName(handle)), _text(nvml.nvmlDeviceGetUUID(handle))
    )


def _named(nvml: Any, gpus: list[VisibleGpu], entry: str) -> VisibleGpu | None:
    """The GPU that one entry of CUDA_VISIBLE_DEVICES means; None when it means none."""
    if entry.isdecimal():
        return gpus[int(entry)] if int(entry) < len(gpus) else None
    if entry.startswith("MIG-"):  # a slice of a GPU is not among the whole ones
        try:
            return _describe(nvml, nvml.nvmlDeviceGetHandleByUUID(entry))
        except nvml.NVMLError:
            return None
    matching = [gpu for gpu in gpus if entry and gpu.uuid.startswith(entry)]
    return matching[0] if len(matching) == 1 else None


def _text(value: str | bytes) -> str:
    """Older bindings return bytes."""
    return value.decode() if isinstance(value, bytes) else value
