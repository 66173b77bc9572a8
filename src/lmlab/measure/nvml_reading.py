"""One look at a GPU through NVML: clocks, heat, power, why it is slowed, who is on it.

NVML has renamed what it calls a reason for running below the highest clock, from "throttle
reason" to "clocks event reason"; the bits are the same. The newer name is asked first. Each
question is asked for itself, since virtual and consumer GPUs leave some unanswered, and an
unanswered one is None.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

# Bits of nvmlDeviceGetCurrentClocksEventReasons, as in nvml.h. They have not changed since 2016,
# while the names of their constants have.
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
    """The state of one GPU at one moment; None for what it does not tell."""

    sm_clock_mhz: int | None
    memory_clock_mhz: int | None
    temperature_c: int | None
    power_w: float | None
    slowdown_reasons: list[str]
    lost_to_heat_ns: int | None
    """Counter since the driver was loaded; only differences mean something."""
    lost_to_power_ns: int | None
    memory_used_bytes: int | None
    utilisation_percent: int | None
    """Share of the last fraction of a second in which any kernel ran."""
    compute_pids: list[int]


def read_gpu(nvml: Any, handle: Any) -> Reading:
    """Ask everything now; takes a few milliseconds at most."""

    def ask(question: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return question(handle, *arguments)
        except nvml.NVMLError:
            return None

    power_mw = ask(nvml.nvmlDeviceGetPowerUsage)
    heat = ask(nvml.nvmlDeviceGetViolationStatus, nvml.NVML_PERF_POLICY_THERMAL)
    power = ask(nvml.nvmlDeviceGetViolationStatus, nvml.NVML_PERF_POLICY_POWER)
    memory = ask(nvml.nvmlDeviceGetMemoryInfo)
    rates = ask(nvml.nvmlDeviceGetUtilizationRates)
    processes = ask(nvml.nvmlDeviceGetComputeRunningProcesses) or []
    return Reading(
        sm_clock_mhz=ask(nvml.nvmlDeviceGetClockInfo, nvml.NVML_CLOCK_SM),
        memory_clock_mhz=ask(nvml.nvmlDeviceGetClockInfo, nvml.NVML_CLOCK_MEM),
        temperature_c=ask(nvml.nvmlDeviceGetTemperature, nvml.NVML_TEMPERATURE_GPU),
        power_w=None if power_mw is None else power_mw / 1e3,
        slowdown_reasons=reason_names(ask(_reasons_question(nvml)) or 0),
        lost_to_heat_ns=None if heat is None else int(heat.violationTime),
        lost_to_power_ns=None if power is None else int(power.violationTime),
        memory_used_bytes=None if memory is None else int(memory.used),
        utilisation_percent=None if rates is None else int(rates.gpu),
        compute_pids=sorted(int(process.pid) for process in processes),
    )


def reason_names(bits: int) -> list[str]:
    """The reasons in a bit mask, in the order of their bits."""
    return [name for name, bit in REASON_BITS.items() if bits & bit]


def _reasons_question(nvml: Any) -> Callable[..., Any]:
    newer = getattr(nvml, "nvmlDeviceGetCurrentClocksEventReasons", None)
    question: Callable[..., Any] = newer or nvml.nvmlDeviceGetCurrentClocksThrottleReasons
    return question
