"""Flags from readings before and after a measurement: throttled, power-capped, shared."""

import json
import os
import sys
from dataclasses import replace

import pytest
import torch

from lmlab.measure import gpu_state
from lmlab.measure.gpu_state import GpuWatch, OwnUsage, own_usage, read_gpu, slowdown_flags

from .fake_nvml import FakeGpu, FakeNvml

CUDA = torch.device("cuda", 0)
GIB = 2**30
SW_POWER_CAP, THROTTLING = 0x4, {"slowdown": 0x8, "software": 0x20, "heat": 0x40, "brake": 0x80}
NO_CONTEXT = OwnUsage(pids=frozenset({100}), has_context=False, reserved_bytes=0)
WITH_CONTEXT = OwnUsage(pids=frozenset({100}), has_context=True, reserved_bytes=40 * GIB)


class Watched:
    """A watch over one reading after another, of which the last stays forever."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.slept: list[float] = []
        self._patch = monkeypatch.setattr
        self._patch("time.sleep", self.slept.append)

    def watch(self, *gpus: FakeGpu, own: OwnUsage = NO_CONTEXT) -> GpuWatch:
        left = list(gpus)
        read = lambda _: read_gpu(FakeNvml(), left.pop(0) if len(left) > 1 else left[0])  # noqa: E731
        self._patch(gpu_state, "read_device", read)
        self._patch(gpu_state, "own_usage", lambda _: own)
        with GpuWatch(CUDA) as watch:
            pass
        return watch


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Watched:
    return Watched(monkeypatch)


@pytest.mark.parametrize("bit", THROTTLING.values(), ids=THROTTLING)
def test_slowdown_at_either_end_is_throttling(bit: int, watched: Watched) -> None:
    for before, after in ((bit, 0), (0, bit)):
        assert watched.watch(FakeGpu(reasons=before), FakeGpu(reasons=after)).flags == ["throttled"]
    newer = read_gpu(FakeNvml(newer=True), FakeGpu(reasons=bit))
    assert newer == read_gpu(FakeNvml(), FakeGpu(reasons=bit)), "by the newer name of the reasons"


def test_a_power_cap_counts_only_after_the_measurement(watched: Watched) -> None:
    capped = FakeGpu(reasons=SW_POWER_CAP)
    assert watched.watch(FakeGpu(), capped).flags == ["power_capped"]
    assert watched.watch(capped, FakeGpu()).flags == [], "that of an earlier job"


@pytest.mark.parametrize(
    ("counter", "lost_ms", "flags"),
    [
        ("lost_to_heat_ns", 5, set()),
        ("lost_to_heat_ns", 500, {"throttled"}),
        ("lost_to_power_ns", 500, {"power_capped"}),
    ],
)
def test_lost_time_counts_from_one_percent(counter: str, lost_ms: int, flags: set[str]) -> None:
    before = read_gpu(FakeNvml(), FakeGpu(heat_ns=7_000, power_ns=7_000))
    after = replace(before, **{counter: 7_000 + lost_ms * 1_000_000})
    assert slowdown_flags(before, after, elapsed_s=1.0) == flags
    assert slowdown_flags(replace(before, **{counter: None}), after, elapsed_s=1.0) == set()


SHARED = {
    "own process": (FakeGpu(pids=[100]), WITH_CONTEXT, False),
    "another process": (FakeGpu(pids=[100, 777]), WITH_CONTEXT, True),
    "another process before ours": (FakeGpu(pids=[777]), NO_CONTEXT, True),
    "own process, the host's pid": (FakeGpu(pids=[777]), WITH_CONTEXT, False),
    "both with the host's pids": (FakeGpu(pids=[777, 778]), WITH_CONTEXT, True),
    "own memory": (FakeGpu(memory_used=41 * GIB), WITH_CONTEXT, False),
    "hidden memory": (FakeGpu(memory_used=60 * GIB), WITH_CONTEXT, True),
    "memory before ours": (FakeGpu(memory_used=9 * GIB), NO_CONTEXT, True),
    "memory unknown": (FakeGpu(unanswered={"memory"}), NO_CONTEXT, False),
}


@pytest.mark.parametrize("case", SHARED)
def test_a_gpu_is_shared_if_processes_or_memory_cannot_be_ours(case: str, watched: Watched) -> None:
    gpu, own, shared = SHARED[case]
    assert gpu_state.foreign_use(read_gpu(FakeNvml(), gpu), own) is shared
    flags = watched.watch(FakeGpu(), gpu, own=own).flags
    assert flags == ["gpu_shared"] * shared, "also at the end alone"


@pytest.mark.parametrize(
    ("utilisation", "own", "flags", "polls"),
    [
        pytest.param([0], NO_CONTEXT, [], 0, id="idle"),
        pytest.param([95, 60, 0], NO_CONTEXT, [], 2, id="fades: the previous job"),
        pytest.param([95], NO_CONTEXT, ["gpu_shared"], 11, id="stays: another process"),
        pytest.param([95], WITH_CONTEXT, [], 0, id="our own"),
    ],
)
def test_utilisation_before_our_first_cuda_call_is_polled_for_about_a_second(
    utilisation: list[int], own: OwnUsage, flags: list[str], polls: int, watched: Watched
) -> None:
    gpus = (FakeGpu(utilisation=percent, pids=[100]) for percent in utilisation)
    assert watched.watch(*gpus, own=own).flags == flags
    assert sum(watched.slept) == pytest.approx(0.1 * polls)


def test_readings_are_json_with_units_and_none_for_what_is_not_answered(watched: Watched) -> None:
    questions = {"clock", "temperature", "power", "violations", "utilisation", "processes"}
    gpus = FakeGpu(reasons=0x5), FakeGpu(unanswered=questions)
    watch = watched.watch(*gpus, own=WITH_CONTEXT)
    readings = json.loads(json.dumps(watch.readings))
    before, after = readings["before"], readings["after"]
    assert (before["sm_clock_mhz"], before["power_w"], before["temperature_c"]) == (1980, 612.5, 41)
    assert before["slowdown_reasons"] == ["gpu_idle", "sw_power_cap"]
    assert {name for name, value in after.items() if value is None} == {
        *("sm_clock_mhz", "memory_clock_mhz", "temperature_c", "power_w"),
        *("lost_to_heat_ns", "lost_to_power_ns", "utilisation_percent"),
    }


def test_a_cpu_has_no_readings_and_no_flags() -> None:
    with pytest.raises(RuntimeError, match="inside"), GpuWatch(torch.device("cpu")) as watch:
        raise RuntimeError("inside")
    assert (watch.flags, watch.readings) == ([], None)
    assert {os.getpid(), os.getppid()} <= own_usage(torch.device("cpu")).pids


@pytest.mark.gpu
def test_a_real_gpu_can_be_watched() -> None:
    with GpuWatch(CUDA) as watch:
        torch.randn(4096, 4096, device="cuda").sum().item()
    assert watch.readings is not None
    assert watch.readings["after"]["sm_clock_mhz"] > 0
    assert set(watch.flags) <= {"gpu_shared", "power_capped", "throttled"}


def test_a_gpu_that_is_lost_meanwhile_raises_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The measured code has failed already, and its error is the reason."""
    gpu = FakeGpu()
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(gpu))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(gpu_state, "own_usage", lambda _: NO_CONTEXT)
    with GpuWatch(CUDA) as watch:
        gpu.unanswered |= {"name", "uuid", "reasons", "memory"}
    assert watch.flags == []
