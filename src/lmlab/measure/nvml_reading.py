"""One reading of a GPU's state through NVML: clocks, temperature, power, throttling, processes.

Virtual and consumer GPUs leave some questions unanswered; those fields are None. NVML has renamed
its "throttle reasons" to "clocks event reasons"; the bits are the same, and the newer function is
tried first.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from lmlab.measure.nvml import query

# Bits of nvmlDeviceGetCurrentClocksEventReasons in nvml.h; unlike the names of their constants,
# they have not changed since 2016.
REASON_BITS = {
    "gpu_idle": 0x1,
    "applications_clocks_setting": 0x2,
    "sw_power_cap": 0x4,
    "hw_slowdown": 0x8,
    "sync_boost": 0x10,
    "sw_thermal_slowdown": 0x20,
    "hw_thermal_slowdown": 0x40,
    "hw_power_brake": 0x80,
    "display_clock_setting": 0x100,
}


@dataclass(frozen=True, kw_only=True)
class Reading:
    """The state of one GPU at one moment; None for what it does not report."""

    sm_clock_mhz: int | None
    memory_clock_mhz: int | None
    temperature_c: int | None
    power_w: float | None
    slowdown_reasons: list[str]
    lost_to_heat_ns: int | None
    """Counter since the driver was loaded; only differences are meaningful."""
    lost_to_power_ns: int | None
    memory_used_bytes: int | None
    utilisation_percent: int | None
    """Share of the last fraction of a second in which any kernel ran."""
    compute_pids: list[int]


def read_gpu(nvml: Any, handle: Any) -> Reading:
    """Read everything; takes a few milliseconds at most."""
    ask = partial(query, nvml)
    heat = ask(nvml.nvmlDeviceGetViolationStatus, handle, nvml.NVML_PERF_POLICY_THERMAL)
    power = ask(nvml.nvmlDeviceGetViolationStatus, handle, nvml.NVML_PERF_POLICY_POWER)
    power_mw = ask(nvml.nvmlDeviceGetPowerUsage, handle)
    memory = ask(nvml.nvmlDeviceGetMemoryInfo, handle)
    rates = ask(nvml.nvmlDeviceGetUtilizationRates, handle)
    processes = ask(nvml.nvmlDeviceGetComputeRunningProcesses, handle) or []
    newer = getattr(nvml, "nvmlDeviceGetCurrentClocksEventReasons", None)
    reasons = ask(newer or nvml.nvmlDeviceGetCurrentClocksThrottleReasons, handle) or 0
    return Reading(
        sm_clock_mhz=ask(nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_SM),
        memory_clock_mhz=ask(nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_MEM),
        temperature_c=ask(nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU),
        power_w=None if power_mw is None else power_mw / 1e3,
        slowdown_reasons=[name for name, bit in REASON_BITS.items() if reasons & bit],
        lost_to_heat_ns=None if heat is None else int(heat.violationTime),
        lost_to_power_ns=None if power is None else int(power.violationTime),
        memory_used_bytes=None if memory is None else int(memory.used),
        utilisation_percent=None if rates is None else int(rates.gpu),
        compute_pids=sorted(int(process.pid) for process in processes),
    )
