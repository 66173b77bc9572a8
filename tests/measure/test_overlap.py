"""Profiler events: device time by phase, computation and communication."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity

from lmlab.measure.device_time import busy_times, by_phase, device_times
from lmlab.measure.gpu_busy import interval, is_gpu_work, profiled_events
from lmlab.measure.graph_replay import graph_replay_records
from lmlab.measure.overlap import MAX_INTERVALS, overlap_from_events, profile_overlap
from tests.measure.one_rank import group_of_one

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
MAIN, GLOO_THREAD = 1, 2


@dataclass
class Event:
    """The part of a profiler event that is used: methods, times in nanoseconds."""

    title: str
    start: int
    end: int
    thread: int = MAIN
    on_gpu: bool = False
    index: int = 0
    annotation: bool = False

    def name(self) -> str:
        return self.title

    def start_ns(self) -> int:
        return self.start

    def duration_ns(self) -> int:
        return self.end - self.start

    def device_type(self) -> DeviceType:
        return DeviceType.CUDA if self.on_gpu else DeviceType.CPU

    def device_index(self) -> int:
        return self.index

    def start_thread_id(self) -> int:
        return self.thread

    def is_user_annotation(self) -> bool:
        return self.annotation


def test_the_fake_has_the_methods_of_a_real_event() -> None:
    (real, *_) = profiled_events(lambda: torch.ones(2) + 1, CPU, [ProfilerActivity.CPU])
    used = [name for name, value in vars(Event).items() if callable(value) and name[0] != "_"]
    assert [name for name in used if not hasattr(real, name)] == []


@pytest.mark.parametrize(
    ("event", "counts"),
    [
        pytest.param(Event("k", 5, 8, on_gpu=True), True, id="kernel"),
        pytest.param(Event("k", 5, 8), False, id="launch on the host"),
        pytest.param(Event("k", 5, 8, on_gpu=True, index=1), False, id="another GPU"),
        pytest.param(Event("k", 5, 8, on_gpu=True, annotation=True), False, id="range"),
    ],
)
def test_only_work_of_this_gpu_counts_as_busy(event: Event, counts: bool) -> None:
    assert is_gpu_work(event, GPU) is counts
    assert interval(event) == (5, 8)


def test_device_time_is_the_union_of_the_work_that_starts_in_a_phase() -> None:
    edges = [("forward", 0, 100), ("backward", 100, 200), ("forward", 300, 400)]
    edges.append(("backward", 400, 500))
    work = [(10, 30), (20, 40), (110, 200), (250, 260), (300, 310), (350, 352)]
    found = by_phase(edges, work[::-1])
    assert {name: [len(step) for step in steps] for name, steps in found.items()} == {
        "forward": [2, 2],
        "backward": [1, 0],
    }
    times = busy_times(found)
    assert {name: found.samples_ms for name, found in times.items()} == {
        "forward": pytest.approx((30e-6, 12e-6)),
        "backward": pytest.approx((90e-6, 0)),
        "total": pytest.approx((120e-6, 12e-6)),
    }
    assert {found.clock for found in times.values()} == {"device"}


def test_a_cpu_has_no_device_time() -> None:
    phases = [("forward", lambda: torch.ones(2) + 1)]
    assert device_times(phases, CPU) == {}
    assert graph_replay_records(phases, CPU, prepare=lambda: None) == []


def test_on_a_cpu_operators_are_computation_except_gloos_own() -> None:
    events = [
        Event("aten::mm", 0, 10),
        Event("aten::mul", 2, 4),
        Event("gloo:all_reduce", 5, 25, thread=GLOO_THREAD, annotation=True),
        Event("aten::div_", 20, 24, thread=GLOO_THREAD),
        Event("autograd::engine::evaluate_function", 0, 100),
        Event("aten::mm", 22, 30),
    ]
    found = overlap_from_events(events, CPU)
    assert found.compute == [(0, 10), (22, 30)]
    assert found.communication == [(5, 25)]
    assert found.overlapped_ns == 5 + 3
    assert found.overlapped_share == pytest.approx(8 / 20)
    assert found.seen_as == "gloo's messages"


def test_on_a_gpu_kernels_are_computation_and_nccl_kernels_communication() -> None:
    events = [
        Event("sm90_gemm", 0, 10, on_gpu=True),
        Event("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 6, 20, on_gpu=True),
        Event("nccl:all_reduce", 0, 99, on_gpu=True, annotation=True),
        Event("sm90_gemm", 0, 99, on_gpu=True, index=1),
        Event("aten::mm", 0, 99),
    ]
    found = overlap_from_events(events, GPU)
    assert found.compute == [(0, 10)]
    assert found.overlapped_share == pytest.approx(4 / 14)
    assert found.seen_as == "NCCL kernels"


def test_copies_for_gloo_on_a_gpu_are_separate() -> None:
    events = [
        Event("sm90_gemm", 0, 10, on_gpu=True),
        Event("Memcpy DtoH (Device -> Pinned)", 10, 12, on_gpu=True),
        Event("gloo:all_reduce", 8, 30, thread=GLOO_THREAD, annotation=True),
    ]
    found = overlap_from_events(events, GPU)
    assert (found.copies, found.compute, found.overlapped_ns) == ([(10, 12)], [(0, 10)], 2)


def test_sums_are_exact_and_intervals_are_reduced_for_figures() -> None:
    many = [Event("aten::mm", 1000 * i, 1000 * i + 400) for i in range(1000)]
    found = overlap_from_events(many, CPU).to_json()
    assert found["compute_ms"] == pytest.approx(0.4)
    assert len(found["intervals_ms"]["compute"]) == MAX_INTERVALS
    assert found["intervals_ms"]["compute"][-1][1] == pytest.approx(0.9994, abs=1e-3)
    assert (found["overlapped_share"], found["seen_as"]) == (None, None), "no messages"


def test_the_real_profiler_sees_gloos_messages(tmp_path: Path) -> None:
    with group_of_one(tmp_path):
        found = profile_overlap(lambda: dist.all_reduce(torch.ones(1000)), CPU)
    assert found.seen_as == "gloo's messages"
    assert found.compute


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_device_time_is_that_of_the_kernels_and_not_of_the_host_around_them() -> None:
    a = torch.randn(2048, 2048, device="cuda")

    def idle_in_between() -> None:
        with torch.profiler.record_function("a range over everything"):
            for _ in range(3):
                a @ a
                torch.cuda.synchronize()
                sum(range(1_000_000))

    phases = [("once", lambda: a @ a), ("thrice", idle_in_between)]
    times = device_times(phases, GPU)
    assert times["thrice"].median_ms == pytest.approx(3 * times["once"].median_ms, rel=0.1)
    records = graph_replay_records(phases[:1], GPU, prepare=lambda: None)
    found = {record["quantity"]: record["value"] for record in records}
    assert found["kernels"] >= 1
    assert found["graph_replay_time"] == pytest.approx(times["once"].median_ms, rel=0.2)
