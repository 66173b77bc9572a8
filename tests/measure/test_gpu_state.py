"""Flags from readings before and after: hot, capped, shared."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from lmlab.measure.gpu_state import (
    GpuWatch,
    Own,
    Reading,
    foreign_use,
    own_part,
    slowdown_flags,
)
from lmlab.measure.nvml_reading import read_gpu

from .fake_nvml import FakeGpu, FakeNvml, NewerFakeNvml

CUDA = torch.device("cuda", 0)
GIB = 2**30
SW_POWER_CAP, HW_SLOWDOWN, SW_THERMAL, HW_THERMAL, POWER_BRAKE = 0x4, 0x8, 0x20, 0x40, 0x80
NOT_YET_AWAKE = Own(pids=frozenset({100}), has_context=False, reserved_bytes=0)
AWAKE = Own(pids=frozenset({100}), has_context=True, reserved_bytes=40 * GIB)


class ReadsInTurn:
    """A GPU that gives one prepared reading after another, and the last one for ever."""

    def __init__(self, *gpus: FakeGpu) -> None:
        self._gpus = list(gpus)

    def read(self) -> Reading:
        gpu = self._gpus.pop(0) if len(self._gpus) > 1 else self._gpus[0]
        return read_gpu(FakeNvml(), gpu)


def flags_of(*gpus: FakeGpu, own: Own = NOT_YET_AWAKE) -> list[str]:
    with GpuWatch(CUDA, gpu=ReadsInTurn(*gpus), own=lambda: own, sleep=lambda _: None) as watch:
        pass
    return watch.flags


def test_a_calm_gpu_raises_no_flag() -> None:
    assert flags_of(FakeGpu()) == []


@pytest.mark.parametrize(
    "reason",
    [HW_SLOWDOWN, SW_THERMAL, HW_THERMAL, POWER_BRAKE],
    ids=["hw-slowdown", "sw-thermal", "hw-thermal", "power-brake"],
)
@pytest.mark.parametrize("when", ["before", "after"])
def test_heat_and_power_brakes_are_throttling(reason: int, when: str) -> None:
    slow, calm = FakeGpu(reasons=reason), FakeGpu()
    assert flags_of(*((slow, calm) if when == "before" else (calm, slow))) == ["throttled"]


def test_the_power_cap_under_load_is_a_flag_of_its_own() -> None:
    assert flags_of(FakeGpu(), FakeGpu(reasons=SW_POWER_CAP)) == ["power_capped"]


def test_a_power_cap_that_somebody_met_before_is_not_ours() -> None:
    assert flags_of(FakeGpu(reasons=SW_POWER_CAP), FakeGpu()) == []


@pytest.mark.parametrize(
    ("lost_ms", "expected"), [(5, set()), (500, {"throttled"})], ids=["a-little", "much"]
)
def test_time_lost_to_heat_between_the_readings_counts(lost_ms: int, expected: set[str]) -> None:
    before = read_gpu(FakeNvml(), FakeGpu(heat_ns=7_000))
    after = replace(before, lost_to_heat_ns=7_000 + lost_ms * 1_000_000)
    assert slowdown_flags(before, after, elapsed_s=1.0) == expected


def test_time_lost_to_the_power_limit_between_the_readings_counts() -> None:
    before = read_gpu(FakeNvml(), FakeGpu())
    after = replace(before, lost_to_power_ns=500_000_000)
    assert slowdown_flags(before, after, elapsed_s=1.0) == {"power_capped"}


@pytest.mark.parametrize(
    ("gpu", "own", "shared"),
    [
        pytest.param(FakeGpu(pids=[100]), AWAKE, False, id="our-own-process"),
        pytest.param(FakeGpu(pids=[100, 777]), AWAKE, True, id="a-stranger-beside-us"),
        pytest.param(FakeGpu(pids=[777]), NOT_YET_AWAKE, True, id="a-stranger-before-us"),
        pytest.param(FakeGpu(pids=[777]), AWAKE, False, id="we-under-the-hosts-number"),
        pytest.param(FakeGpu(pids=[777, 778]), AWAKE, True, id="we-and-a-stranger-renumbered"),
        pytest.param(FakeGpu(memory_used=41 * GIB), AWAKE, False, id="our-own-memory"),
        pytest.param(FakeGpu(memory_used=60 * GIB), AWAKE, True, id="memory-nobody-owns-up-to"),
        pytest.param(FakeGpu(memory_used=9 * GIB), NOT_YET_AWAKE, True, id="memory-before-us"),
        pytest.param(FakeGpu(unanswered={"memory"}), NOT_YET_AWAKE, False, id="memory-unknown"),
    ],
)
def test_a_gpu_is_shared_when_processes_or_memory_cannot_be_ours(
    gpu: FakeGpu, own: Own, shared: bool
) -> None:
    assert foreign_use(read_gpu(FakeNvml(), gpu), own) is shared


def test_a_stranger_who_comes_during_the_watch_is_seen_at_its_end() -> None:
    assert flags_of(FakeGpu(), FakeGpu(pids=[777])) == ["gpu_shared"]


@pytest.mark.parametrize(
    ("utilisation", "expected"),
    [
        pytest.param([0], [], id="quiet"),
        pytest.param([95, 60, 0], [], id="fading-was-the-job-before"),
        pytest.param([95], ["gpu_shared"], id="still-busy-is-a-neighbour"),
    ],
)
def test_utilisation_before_our_first_call_is_looked_at_until_it_fades(
    utilisation: list[int], expected: list[str]
) -> None:
    assert flags_of(*(FakeGpu(utilisation=percent) for percent in utilisation)) == expected


def test_looking_again_takes_little_more_than_a_second_at_most() -> None:
    slept: list[float] = []
    busy = ReadsInTurn(FakeGpu(utilisation=95))
    with GpuWatch(CUDA, gpu=busy, own=lambda: NOT_YET_AWAKE, sleep=slept.append):
        pass
    assert 1.0 < sum(slept) < 1.2


def test_utilisation_is_ours_once_we_have_used_the_gpu() -> None:
    assert flags_of(FakeGpu(utilisation=95, pids=[100]), own=AWAKE) == []


def test_readings_are_json_with_units() -> None:
    with GpuWatch(CUDA, gpu=ReadsInTurn(FakeGpu(reasons=0x5)), own=lambda: AWAKE) as watch:
        pass
    assert watch.readings is not None
    before = json.loads(json.dumps(watch.readings))["before"]
    assert before["sm_clock_mhz"] == 1980
    assert before["power_w"] == 612.5
    assert before["temperature_c"] == 41
    assert before["slowdown_reasons"] == ["gpu_idle", "sw_power_cap"]


def test_a_cpu_has_no_readings_and_no_flags() -> None:
    with GpuWatch(torch.device("cpu")) as watch:
        pass
    assert watch.flags == []
    assert watch.readings is None


def test_a_measurement_that_fails_still_fails_under_a_watch() -> None:
    def fail() -> None:
        raise RuntimeError("no luck")

    with (
        pytest.raises(RuntimeError, match="no luck"),
        GpuWatch(CUDA, gpu=ReadsInTurn(FakeGpu()), own=lambda: AWAKE),
    ):
        fail()


def test_questions_that_a_gpu_does_not_answer_are_none() -> None:
    silent = FakeGpu(
        unanswered={"clock", "temperature", "power", "violations", "utilisation", "processes"}
    )
    reading = read_gpu(FakeNvml(), silent)
    assert reading.sm_clock_mhz is None
    assert reading.power_w is None
    assert reading.lost_to_heat_ns is None
    assert reading.compute_pids == []


@pytest.mark.parametrize("bindings", [FakeNvml, NewerFakeNvml], ids=["older", "newer"])
def test_both_names_of_the_slowdown_reasons_are_understood(
    bindings: Callable[[], FakeNvml],
) -> None:
    reading = read_gpu(bindings(), FakeGpu(reasons=HW_THERMAL))
    assert reading.slowdown_reasons == ["hw_thermal_slowdown"]


def test_this_process_and_its_parent_are_our_own() -> None:
    assert {os.getpid(), os.getppid()} <= own_part(torch.device("cpu")).pids


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_a_real_gpu_can_be_watched() -> None:
    a = torch.randn(4096, 4096, device="cuda")
    with GpuWatch(CUDA) as watch:
        for _ in range(20):
            a @ a
        torch.cuda.synchronize()
    assert watch.readings is not None
    assert watch.readings["after"]["sm_clock_mhz"] > 0
    assert set(watch.flags) <= {"gpu_shared", "power_capped", "throttled"}
