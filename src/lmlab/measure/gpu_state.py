"""Whether the GPU was throttled, power-capped or shared, from readings before and after a run.

- `throttled`: clocks were reduced because of heat or the power supply. Such a number says more
  about the rack than about the code.
- `power_capped`: it reached its power limit. On a datacenter GPU running matrix products that is
  normal operation, so it has a separate flag and is not a fault.
- `gpu_shared`: another process was using the GPU before or after the measurement.

Clocks may have recovered by the time the last kernel is done, so the driver's counters of time lost
to heat and power are compared as well, where they exist. No thread samples in between: it would
compete with the host thread whose launches are being timed.

Detecting other processes takes care. Our ancestors and children do not count. In a container NVML
reports host process ids: if we hold a context and our id is missing, one process is assumed to be
us. Memory reveals processes that NVML hides: anything beyond our own tensors and one context.
Utilization is an average over up to a second, in which the previous job may have run, so it counts
only if it is still high a second later and this process has not used the GPU yet. A watch is
therefore most reliable if it starts before the first CUDA call.
"""

import time
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Self

import psutil
import torch

from lmlab.measure.nvml import nvml_session, query, visible_gpu

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
THROTTLE_REASONS = frozenset(
    {"hw_slowdown", "hw_thermal_slowdown", "hw_power_brake", "sw_thermal_slowdown"}
)
POWER_CAP_REASON = "sw_power_cap"

# Time lost to heat or power sets a flag above this share of the elapsed time.
_LOST_SHARE = 0.01
# A CUDA context with its kernel images, the driver's own reserve, and some margin.
_CONTEXT_BYTES = 2 * 2**30
_BUSY_PERCENT = 20
# Utilization is averaged over up to a second; eleven more readings reach just beyond it.
_POLL_S = 0.1
_POLLS = 11


@dataclass(frozen=True, kw_only=True)
class Reading:
    """The state of one GPU at one moment; None for values it does not report."""

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
    # NVML has renamed its "throttle reasons" to "clocks event reasons"; the bits are the same.
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


@dataclass(frozen=True)
class OwnUsage:
    """This process's share of what a reading shows."""

    pids: frozenset[int]
    has_context: bool
    reserved_bytes: int


class GpuWatch:
    """`with GpuWatch(device) as watch: ...`, then `watch.flags` and `watch.readings`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before: Reading | None = None
        self._after: Reading | None = None
        self._started = self._elapsed_s = 0.0
        self._shared = False

    def __enter__(self) -> Self:
        self._before = read_device(self._device)
        if self._before is not None:
            own = own_usage(self._device)
            self._shared = foreign_use(self._before, own) or (
                not own.has_context and self._stays_busy(self._before)
            )
        self._started = time.monotonic()
        return self

    def __exit__(self, *exception: object) -> None:
        self._elapsed_s = time.monotonic() - self._started
        self._after = read_device(self._device)
        if self._after is not None:
            self._shared = self._shared or foreign_use(self._after, own_usage(self._device))

    @property
    def flags(self) -> list[str]:
        """Subset of `gpu_shared`, `power_capped`, `throttled`; empty without a GPU."""
        if self._before is None or self._after is None:
            return []
        shared = {"gpu_shared"} if self._shared else set()
        return sorted(slowdown_flags(self._before, self._after, self._elapsed_s) | shared)

    @property
    def readings(self) -> dict[str, Any] | None:
        """Both readings for the result; None without a GPU."""
        if self._before is None or self._after is None:
            return None
        return {"before": asdict(self._before), "after": asdict(self._after)}

    def _stays_busy(self, reading: Reading | None) -> bool:
        """Poll until idle; True if still busy after a finished job has left the average."""
        for _ in range(_POLLS):
            if not _busy(reading):
                return False
            time.sleep(_POLL_S)
            reading = read_device(self._device)
        return _busy(reading)


def read_device(device: torch.device) -> Reading | None:
    """A reading of the GPU behind a torch device; None for a CPU or without NVML."""
    if device.type != "cuda":
        return None
    with nvml_session() as nvml:
        gpu = visible_gpu(nvml, device.index or 0)
        return None if gpu is None else read_gpu(nvml, gpu.handle)


def slowdown_flags(before: Reading, after: Reading, elapsed_s: float) -> set[str]:
    """`throttled` and `power_capped`, from the reasons in both readings and counter increases."""
    flags = set()
    reasons = set(before.slowdown_reasons) | set(after.slowdown_reasons)
    lost_to_heat = _lost(before.lost_to_heat_ns, after.lost_to_heat_ns, elapsed_s)
    lost_to_power = _lost(before.lost_to_power_ns, after.lost_to_power_ns, elapsed_s)
    if reasons & THROTTLE_REASONS or lost_to_heat:
        flags.add("throttled")
    # A power cap before the watch belongs to whatever ran then.
    if POWER_CAP_REASON in after.slowdown_reasons or lost_to_power:
        flags.add("power_capped")
    return flags


def foreign_use(reading: Reading, own: OwnUsage) -> bool:
    """Whether the GPU shows processes or memory that cannot be ours."""
    foreign = set(reading.compute_pids) - own.pids
    we_are_hidden = own.has_context and not own.pids & set(reading.compute_pids)
    if len(foreign) > (1 if we_are_hidden else 0):
        return True
    used = reading.memory_used_bytes
    return used is not None and used > own.reserved_bytes + _CONTEXT_BYTES


def own_usage(device: torch.device) -> OwnUsage:
    """Process ids of our family (ancestors, descendants) and the memory PyTorch has reserved."""
    process = psutil.Process()
    family = [process, *process.parents(), *process.children(recursive=True)]
    has_context = torch.cuda.is_initialized()
    return OwnUsage(
        pids=frozenset(member.pid for member in family),
        has_context=has_context,
        reserved_bytes=torch.cuda.memory_reserved(device) if has_context else 0,
    )


def _busy(reading: Reading | None) -> bool:
    return reading is not None and (reading.utilisation_percent or 0) >= _BUSY_PERCENT


def _lost(before_ns: int | None, after_ns: int | None, elapsed_s: float) -> bool:
    if before_ns is None or after_ns is None:
        return False
    return after_ns - before_ns > _LOST_SHARE * elapsed_s * 1e9
