"""The machine card: what a reader must know about a machine to interpret its numbers.

Limits per multiprocessor and per block (registers, shared memory) determine which tile shapes a
kernel can use; the L2 size, what a cold cache is; clocks and power limit, how close the GPU gets to
its peak; the CPU, how fast kernels are launched. Most facts come from PyTorch, the rest from NVML;
registers per block come from the CUDA driver, because neither of the two reports them. Anything
that the machine, driver or PyTorch version does not report is omitted.
"""

import ctypes
import platform
from typing import Any

import psutil
import torch

from lmlab.measure.device import usable_cores
from lmlab.measure.identity import cpu_name, find_machine
from lmlab.measure.nvml import driver_version, nvml_session, query, visible_gpu

# Field of the card -> attribute of torch.cuda.get_device_properties().
_GPU_LIMITS = {
    "sms": "multi_processor_count",
    "warp_size": "warp_size",
    "registers_per_sm": "regs_per_multiprocessor",
    "shared_memory_per_sm_bytes": "shared_memory_per_multiprocessor",
    "shared_memory_per_block_bytes": "shared_memory_per_block",
    "shared_memory_per_block_optin_bytes": "shared_memory_per_block_optin",
    "l2_bytes": "L2_cache_size",
    "memory_bytes": "total_memory",
}
_CU_MAX_REGISTERS_PER_BLOCK = 12  # CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK in cuda.h


def machine_card(device: torch.device) -> dict[str, Any]:
    """The card of the machine that `device` belongs to; unknown facts are omitted."""
    card = {
        "device": device.type,
        **(_gpu_facts(device) if device.type == "cuda" else {"name": cpu_name()}),
        "gpu_count": find_machine().gpu_count,
        "cpu_model": cpu_name(),
        "cpu_logical_cores": psutil.cpu_count(),
        "cpu_usable_cores": usable_cores(),  # this process's affinity mask
        "cpu_architecture": platform.machine(),
        "cpu_memory_bytes": psutil.virtual_memory().total,
        "os": f"{platform.system()} {platform.release()}",
    }
    return {name: fact for name, fact in card.items() if fact is not None}


def _gpu_facts(device: torch.device) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(device)
    index = device.index or 0
    with nvml_session() as nvml:
        gpu = visible_gpu(nvml, index)
        driver = nvml_facts(nvml, gpu.handle) if gpu else {}
    return {
        "name": properties.name,
        **gpu_limits(properties),
        "registers_per_block": _registers_per_block(index),
        **driver,
    }


def gpu_limits(properties: Any) -> dict[str, Any]:
    """Limits from PyTorch's device properties; None where this version lacks one."""
    limits = {name: getattr(properties, each, None) for name, each in _GPU_LIMITS.items()}
    return {**limits, "compute_capability": f"{properties.major}.{properties.minor}"}


def nvml_facts(nvml: Any, handle: Any) -> dict[str, Any]:
    """Driver version, clocks and power limit of one GPU; None where a query is unsupported."""
    limit_mw = query(nvml, nvml.nvmlDeviceGetEnforcedPowerLimit, handle)
    clock, highest = nvml.nvmlDeviceGetClockInfo, nvml.nvmlDeviceGetMaxClockInfo
    return {
        "driver": driver_version(nvml),
        "clocks_mhz_sm": query(nvml, clock, handle, nvml.NVML_CLOCK_SM),
        "clocks_mhz_memory": query(nvml, clock, handle, nvml.NVML_CLOCK_MEM),
        "clocks_mhz_sm_max": query(nvml, highest, handle, nvml.NVML_CLOCK_SM),
        "clocks_mhz_memory_max": query(nvml, highest, handle, nvml.NVML_CLOCK_MEM),
        "power_limit_w": None if limit_mw is None else limit_mw / 1e3,
    }


def _registers_per_block(gpu_index: int) -> int | None:
    """Ask the CUDA driver library, which PyTorch has already loaded and initialized."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    device, value = ctypes.c_int(), ctypes.c_int()
    failed = cuda.cuDeviceGet(ctypes.byref(device), gpu_index) or cuda.cuDeviceGetAttribute(
        ctypes.byref(value), _CU_MAX_REGISTERS_PER_BLOCK, device
    )
    return None if failed else value.value
