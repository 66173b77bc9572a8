"""Was the GPU in a fit state while a number was taken? Read before and after, said as flags.

- `throttled`: the GPU ran below its clocks because something is wrong with its surroundings: it
  is too hot (software or hardware thermal slowdown) or its supply told it to brake. Such a number
  says more about the rack than about the code.
- `power_capped`: it ran into its power limit. On a datacenter GPU under matrix products that is
  normal operation and part of what the machine is, so it gets a flag of its own and is no fault.
- `gpu_shared`: somebody else was on the GPU, before or after.

A reading is a moment, and by the time the last kernel is done the GPU may already have clocked up
again, so the driver's counters of time lost to heat and to power are compared as well, where the
GPU keeps them. No thread samples in between: it would take the interpreter away from the very
host whose launch times are being measured.

Who is "somebody else" takes care. Our own ancestors and children are not. In a container NVML
speaks of processes by the host's numbers, so our own context can look foreign: if we hold a
context and our number is missing, one process is taken to be us. Memory tells of processes that
NVML hides: whatever is used beyond our own tensors and a context's worth. Utilisation is an
average over up to a second, in which the job before this one may have run, so it counts only when
it is still high a second later and this process has not used the GPU yet: the sharpest verdict
has a watch that begins before the first CUDA call.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Any, Protocol

import psutil
import torch

from lmlab.measure.nvml import nvml_session, visible_gpu
from lmlab.measure.nvml_reading import Reading, read_gpu

THROTTLE_REASONS = frozenset(
    {"hw_slowdown", "hw_thermal_slowdown", "hw_power_brake", "sw_thermal_slowdown"}
)
POWER_CAP_REASON = "sw_power_cap"

# Time lost to a limit counts from this share of the watch on.
_LOST_SHARE = 0.01
# A CUDA context with its kernel images, the driver's own reserve, and some room.
_CONTEXT_BYTES = 2 * 2**30
_BUSY_PERCENT = 20
# Utilisation is averaged over up to a second; eleven looks reach just beyond it.
_LOOK_EVERY_S = 0.1
_LOOKS_AGAIN = 11


class Gpu(Protocol):
    """What a watch needs: a reading of the GPU, now; None where there is nothing to read."""

    def read(self) -> Reading | None: ...


@dataclass(frozen=True)
class Own:
    """This process's part in what a reading shows."""

    pids: frozenset[int]
    has_context: bool
    reserved_bytes: int


class NvmlGpu:
    """The GPU behind a torch device, read through NVML."""

    def __init__(self, index: int) -> None:
        self._index = index

    def read(self) -> Reading | None:
        with nvml_session() as nvml:
            gpu = visible_gpu(nvml, self._index)
            return None if gpu is None else read_gpu(nvml, gpu.handle)


class NoGpu:
    """A CPU: nothing to read."""

    def read(self) -> None:
        return None


class GpuWatch:
    """`with GpuWatch(device) as watch: ...`, then `watch.flags` and `watch.readings`."""

    def __init__(
        self,
        device: torch.device,
        *,
        gpu: Gpu | None = None,
        own: Callable[[], Own] | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        found: Gpu = NvmlGpu(device.index or 0) if device.type == "cuda" else NoGpu()
        self._gpu = gpu or found
        self._own = own or (lambda: own_part(device))
        self._sleep = sleep
        self._before: Reading | None = None
        self._after: Reading | None = None
        self._started = self._elapsed_s = 0.0
        self._shared = False

    def __enter__(self) -> GpuWatch:
        self._before = self._gpu.read()
        if self._before is not None:
            own = self._own()
            self._shared = foreign_use(self._before, own) or (
                not own.has_context and self._stays_busy(self._before)
            )
        self._started = time.monotonic()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._elapsed_s = time.monotonic() - self._started
        self._after = self._gpu.read()
        if self._after is not None:
            self._shared = self._shared or foreign_use(self._after, self._own())

    @property
    def flags(self) -> list[str]:
        """Subset of `gpu_shared`, `power_capped`, `throttled`; empty without a GPU."""
        if self._before is None or self._after is None:
            return []
        return sorted(
            slowdown_flags(self._before, self._after, self._elapsed_s)
            | ({"gpu_shared"} if self._shared else set())
        )

    @property
    def readings(self) -> dict[str, Any] | None:
        """Both readings for the result; None without a GPU."""
        if self._before is None or self._after is None:
            return None
        return {"before": asdict(self._before), "after": asdict(self._after)}

    def _stays_busy(self, reading: Reading) -> bool:
        """Look again until it is quiet, for as long as a job that has ended can still show."""
        looks = 0
        latest: Reading | None = reading
        while _busy(latest) and looks < _LOOKS_AGAIN:
            self._sleep(_LOOK_EVERY_S)
            latest = self._gpu.read()
            looks += 1
        return _busy(latest)


def slowdown_flags(before: Reading, after: Reading, elapsed_s: float) -> set[str]:
    """`throttled` and `power_capped`, from reasons at either end and from the counters between."""
    flags = set()
    reasons = set(before.slowdown_reasons) | set(after.slowdown_reasons)
    lost_to_heat = _lost(before.lost_to_heat_ns, after.lost_to_heat_ns, elapsed_s)
    lost_to_power = _lost(before.lost_to_power_ns, after.lost_to_power_ns, elapsed_s)
    if reasons & THROTTLE_REASONS or lost_to_heat:
        flags.add("throttled")
    # A cap met before the watch belongs to whatever ran then.
    if POWER_CAP_REASON in after.slowdown_reasons or lost_to_power:
        flags.add("power_capped")
    return flags


def foreign_use(reading: Reading, own: Own) -> bool:
    """True when processes or memory on the GPU cannot be ours."""
    foreign = set(reading.compute_pids) - own.pids
    we_are_hidden = own.has_context and not own.pids & set(reading.compute_pids)
    if len(foreign) > (1 if we_are_hidden else 0):
        return True
    if reading.memory_used_bytes is None:
        return False
    return reading.memory_used_bytes > own.reserved_bytes + _CONTEXT_BYTES


def own_part(device: torch.device) -> Own:
    """This process, its ancestors and children; what PyTorch holds of the GPU's memory."""
    process = psutil.Process()
    family = [process, *process.parents(), *process.children(recursive=True)]
    awake = torch.cuda.is_initialized()
    return Own(
        pids=frozenset(member.pid for member in family),
        has_context=awake,
        reserved_bytes=torch.cuda.memory_reserved(device) if awake else 0,
    )


def _busy(reading: Reading | None) -> bool:
    return reading is not None and (reading.utilisation_percent or 0) >= _BUSY_PERCENT


def _lost(before_ns: int | None, after_ns: int | None, elapsed_s: float) -> bool:
    if before_ns is None or after_ns is None:
        return False
    return after_ns - before_ns > _LOST_SHARE * elapsed_s * 1e9
