"""A fake pynvml module: some GPUs, and answers that a test can change or withhold."""

from collections.abc import Callable
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


SM, MEMORY, POWER, THERMAL = 1, 2, 0, 1
# nvmlDeviceGet... -> the question, as `FakeGpu.unanswered` names it, and the answer.
ANSWERS: dict[str, tuple[str, Callable[..., Any]]] = {
    "Name": ("name", lambda gpu: gpu.name),
    "UUID": ("uuid", lambda gpu: gpu.uuid),
    "ClockInfo": ("clock", lambda gpu, kind: gpu.sm_clock if kind == SM else 3201),
    "MaxClockInfo": ("max_clock", lambda gpu, kind: 1980 if kind == SM else 3201),
    "EnforcedPowerLimit": ("power_limit", lambda gpu: 700_000),
    "Temperature": ("temperature", lambda gpu, sensor: 41),
    "PowerUsage": ("power", lambda gpu: 612_500),
    "ViolationStatus": (
        "violations",
        lambda gpu, policy: SimpleNamespace(
            violationTime=gpu.heat_ns if policy == THERMAL else gpu.power_ns
        ),
    ),
    "MemoryInfo": ("memory", lambda gpu: SimpleNamespace(used=gpu.memory_used)),
    "UtilizationRates": ("utilisation", lambda gpu: SimpleNamespace(gpu=gpu.utilisation)),
    "ComputeRunningProcesses": (
        "processes",
        lambda gpu: [SimpleNamespace(pid=pid, usedGpuMemory=gpu.memory_used) for pid in gpu.pids],
    ),
    "CurrentClocksThrottleReasons": ("reasons", lambda gpu: gpu.reasons),
}


class FakeNvml:
    """The functions of pynvml that lmlab.measure calls."""

    NVMLError = NVMLError
    NVML_CLOCK_SM, NVML_CLOCK_MEM = SM, MEMORY
    NVML_TEMPERATURE_GPU = 0
    NVML_PERF_POLICY_POWER, NVML_PERF_POLICY_THERMAL = POWER, THERMAL

    def __init__(self, *gpus: FakeGpu, library: bool = True, newer: bool = False) -> None:
        self.gpus = list(gpus)
        self.library = library
        self.open_sessions = 0
        self._answers = dict(ANSWERS)
        if newer:  # bindings with the newer name of the clock reasons only
            older = self._answers.pop("CurrentClocksThrottleReasons")
            self._answers["CurrentClocksEventReasons"] = older

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

    def __getattr__(self, name: str) -> Callable[..., Any]:
        key = name.removeprefix("nvmlDeviceGet")
        if key not in self._answers:
            raise AttributeError(name)
        question, answer = self._answers[key]

        def call(gpu: FakeGpu, *arguments: Any) -> Any:
            if question in gpu.unanswered:
                raise NVMLError("Not Supported")
            return answer(gpu, *arguments)

        return call
