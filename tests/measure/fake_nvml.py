"""A fake pynvml module: some GPUs, and answers that a test can change or withhold."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any


class NVMLError(Exception):
    """Raised by every failed call."""


@dataclass
class FakeGpu:
    name: str = "NVIDIA H200"
    uuid: str = "GPU-aaaa1111"
    sm_clock: int = 1980
    reasons: int = 0
    pids: list[int] = field(default_factory=list)
    memory_used: int = 500 * 2**20
    utilisation: int = 0
    heat_ns: int = 0
    power_ns: int = 0
    unanswered: set[str] = field(default_factory=set)


class FakeNvml:
    """The functions of pynvml that lmlab.measure calls."""

    NVMLError = NVMLError
    NVML_CLOCK_SM = 1
    NVML_CLOCK_MEM = 2
    NVML_TEMPERATURE_GPU = 0
    NVML_PERF_POLICY_POWER = 0
    NVML_PERF_POLICY_THERMAL = 1

    def __init__(self, *gpus: FakeGpu, library: bool = True) -> None:
        self.gpus = list(gpus)
        self.library = library
        self.open_sessions = 0

    def nvmlInit(self) -> None:
        if not self.library:
            raise NVMLError("NVML Shared Library Not Found")
        self.open_sessions += 1

    def nvmlShutdown(self) -> None:
        self.open_sessions -= 1

    def nvmlSystemGetDriverVersion(self) -> str:
        return "580.1"

    def nvmlDeviceGetCount(self) -> int:
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> FakeGpu:
        return self.gpus[index]

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> FakeGpu:
        raise NVMLError(f"no such slice {uuid}")

    def nvmlDeviceGetName(self, gpu: FakeGpu) -> str:
        return gpu.name

    def nvmlDeviceGetUUID(self, gpu: FakeGpu) -> str:
        return gpu.uuid

    def nvmlDeviceGetClockInfo(self, gpu: FakeGpu, kind: int) -> int:
        return self._answer(gpu, "clock", gpu.sm_clock if kind == self.NVML_CLOCK_SM else 3201)

    def nvmlDeviceGetMaxClockInfo(self, gpu: FakeGpu, kind: int) -> int:
        return self._answer(gpu, "max_clock", 1980 if kind == self.NVML_CLOCK_SM else 3201)

    def nvmlDeviceGetEnforcedPowerLimit(self, gpu: FakeGpu) -> int:
        return self._answer(gpu, "power_limit", 700_000)

    def nvmlDeviceGetTemperature(self, gpu: FakeGpu, sensor: int) -> int:
        return self._answer(gpu, "temperature", 41)

    def nvmlDeviceGetPowerUsage(self, gpu: FakeGpu) -> int:
        return self._answer(gpu, "power", 612_500)

    def nvmlDeviceGetViolationStatus(self, gpu: FakeGpu, policy: int) -> Any:
        heat = policy == self.NVML_PERF_POLICY_THERMAL
        time_ns = gpu.heat_ns if heat else gpu.power_ns
        return self._answer(gpu, "violations", SimpleNamespace(violationTime=time_ns))

    def nvmlDeviceGetMemoryInfo(self, gpu: FakeGpu) -> Any:
        return self._answer(gpu, "memory", SimpleNamespace(used=gpu.memory_used))

    def nvmlDeviceGetUtilizationRates(self, gpu: FakeGpu) -> Any:
        return self._answer(gpu, "utilisation", SimpleNamespace(gpu=gpu.utilisation))

    def nvmlDeviceGetComputeRunningProcesses(self, gpu: FakeGpu) -> list[Any]:
        processes = [SimpleNamespace(pid=pid, usedGpuMemory=gpu.memory_used) for pid in gpu.pids]
        return list(self._answer(gpu, "processes", processes))

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, gpu: FakeGpu) -> int:
        return self._answer(gpu, "reasons", gpu.reasons)

    @staticmethod
    def _answer(gpu: FakeGpu, question: str, value: Any) -> Any:
        if question in gpu.unanswered:
            raise NVMLError("Not Supported")
        return value


class NewerFakeNvml(FakeNvml):
    """Bindings with the newer name of the clock reasons; the older one must not be called."""

    def nvmlDeviceGetCurrentClocksEventReasons(self, gpu: FakeGpu) -> int:
        return self._answer(gpu, "reasons", gpu.reasons)

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, gpu: FakeGpu) -> int:
        raise AssertionError("the older name was called although the newer one exists")
