"""The machine card: what a reader must know about a machine to interpret its numbers.

Limits per multiprocessor and per block (registers, shared memory) determine which tile shapes a
kernel can use, the L2 what a cold cache is, clocks and power limit how close the GPU can get to its
peak, and the processor how fast kernels are launched. Most of it comes from PyTorch, the rest from
NVML; registers per block come from the CUDA driver, because neither of the two reports them.
Whatever a machine, a driver or a version of PyTorch does not report is null.
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
    """The card of the machine that `device` is in; GPU fields are null on a CPU."""
    on_gpu = device.type == "cuda"
    properties = torch.cuda.get_device_properties(device) if on_gpu else None
    return {
        "device": device.type,
        "name": properties.name if properties else cpu_name(),
        **gpu_limits(properties),
        "registers_per_block": _registers_per_block(device.index or 0) if on_gpu else None,
        **_driver_facts(device),
        "gpu_count": find_machine().gpu_count,
        "cpu": cpu_facts(),
        "os": f"{platform.system()} {platform.release()}",
    }


def gpu_limits(properties: Any | None) -> dict[str, Any]:
    """The limits that PyTorch reports; null for what this version does not."""
    limits: dict[str, Any] = {
        field: getattr(properties, attribute, None) for field, attribute in _GPU_LIMITS.items()
    }
    capability = f"{properties.major}.{properties.minor}" if properties else None
    return {**limits, "compute_capability": capability}


def cpu_facts() -> dict[str, Any]:
    """The processor, and how many of its cores this process may use."""
    return {
        "model": cpu_name(),
        "logical_cores": psutil.cpu_count(),
        "usable_cores": usable_cores(),
        "architecture": platform.machine(),
        "memory_bytes": psutil.virtual_memory().total,
    }


def _driver_facts(device: torch.device) -> dict[str, Any]:
    """Driver, clocks and power limit of the GPU; nulls without one."""
    with nvml_session() as nvml:
        gpu = visible_gpu(nvml, device.index or 0) if device.type == "cuda" else None
        if gpu is None:
            return {"driver": None, "clocks_mhz": None, "power_limit_w": None}
        return nvml_facts(nvml, gpu.handle)


def nvml_facts(nvml: Any, handle: Any) -> dict[str, Any]:
    """What NVML reports about one GPU; null for what the GPU does not support."""
    clocks_mhz = {
        "sm": query(nvml, nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_SM),
        "memory": query(nvml, nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_MEM),
        "sm_max": query(nvml, nvml.nvmlDeviceGetMaxClockInfo, handle, nvml.NVML_CLOCK_SM),
        "memory_max": query(nvml, nvml.nvmlDeviceGetMaxClockInfo, handle, nvml.NVML_CLOCK_MEM),
    }
    limit_mw = query(nvml, nvml.nvmlDeviceGetEnforcedPowerLimit, handle)
    return {
        "driver": driver_version(nvml),
        "clocks_mhz": clocks_mhz,
        "power_limit_w": None if limit_mw is None else limit_mw / 1e3,
    }


def _registers_per_block(gpu_index: int) -> int | None:
    """From the CUDA driver library, which PyTorch has loaded and initialized by now."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    device, value = ctypes.c_int(), ctypes.c_int()
    failed = cuda.cuDeviceGet(ctypes.byref(device), gpu_index) or cuda.cuDeviceGetAttribute(
        ctypes.byref(value), _CU_MAX_REGISTERS_PER_BLOCK, device
    )
    return None if failed else value.value
