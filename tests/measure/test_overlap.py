"""Profiler events: device time by phase, computation and communication."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

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


def event(
    name: str,
    start: int,
    end: int,
    *,
    thread: int = MAIN,
    gpu: int | None = None,
    annotation: bool = False,
) -> Any:
    """The part of a profiler event that is used: methods, times in nanoseconds."""
    answers = {
        "name": name,
        "start_ns": start,
        "duration_ns": end - start,
        "device_type": DeviceType.CPU if gpu is None else DeviceType.CUDA,
        "device_index": gpu or 0,
        "start_thread_id": thread,
        "is_user_annotation": annotation,
    }
    return SimpleNamespace(**{key: lambda answer=answer: answer for key, answer in answers.items()})


def test_the_fake_has_the_methods_of_a_real_event() -> None:
    (real, *_) = profiled_events(lambda: torch.ones(2) + 1, CPU, [ProfilerActivity.CPU])
    assert [name for name in vars(event("k", 0, 1)) if not callable(getattr(real, name))] == []


def test_only_work_of_this_gpu_counts_as_busy() -> None:
    kernel, launch = event("k", 5, 8, gpu=0), event("k", 5, 8)
    elsewhere, drawn = event("k", 5, 8, gpu=1), event("k", 5, 8, gpu=0, annotation=True)
    assert [is_gpu_work(each, GPU) for each in (kernel, launch, elsewhere, drawn)] == [
        *(True, False, False, False)
    ]
    assert interval(kernel) == (5, 8)


def test_device_time_is_the_union_of_the_work_that_starts_in_a_phase() -> None:
    edges = [("forward", 0, 100), ("backward", 100, 200)]
    edges += [("forward", 300, 400), ("backward", 400, 500)]
    work = [(350, 352), (300, 310), (250, 260), (110, 200), (20, 40), (10, 30)]
    found = by_phase(edges, work)
    assert found == {
        "forward": [[(10, 30), (20, 40)], [(300, 310), (350, 352)]],
        "backward": [[(110, 200)], []],
    }
    times = busy_times(found)
    assert {name: time.samples_ms for name, time in times.items()} == {
        "forward": pytest.approx((30e-6, 12e-6)),
        "backward": pytest.approx((90e-6, 0)),
        "total": pytest.approx((120e-6, 12e-6)),
    }
    assert {time.clock for time in times.values()} == {"device"}


def test_a_cpu_has_no_device_time() -> None:
    phases = [("forward", lambda: torch.ones(2) + 1)]
    assert device_times(phases, CPU) == {}
    assert graph_replay_records(phases, CPU, prepare=lambda: None) == []


def test_on_a_cpu_operators_are_computation_except_gloos_own() -> None:
    found = overlap_from_events(
        [
            event("aten::mm", 0, 10),
            event("aten::mul", 2, 4),
            event("gloo:all_reduce", 5, 25, thread=GLOO_THREAD, annotation=True),
            event("aten::div_", 20, 24, thread=GLOO_THREAD),
            event("autograd::engine::evaluate_function", 0, 100),
            event("aten::mm", 22, 30),
        ],
        CPU,
    )
    assert (found.compute, found.communication) == ([(0, 10), (22, 30)], [(5, 25)])
    assert (found.overlapped_ns, found.seen_as) == (5 + 3, "gloo's messages")
    assert found.overlapped_share == pytest.approx(8 / 20)


def test_on_a_gpu_kernels_are_computation_and_nccl_kernels_communication() -> None:
    found = overlap_from_events(
        [
            event("sm90_gemm", 0, 10, gpu=0),
            event("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 6, 20, gpu=0),
            event("nccl:all_reduce", 0, 99, gpu=0, annotation=True),
            event("sm90_gemm", 0, 99, gpu=1),
            event("aten::mm", 0, 99),
        ],
        GPU,
    )
    assert (found.compute, found.seen_as) == ([(0, 10)], "NCCL kernels")
    assert found.overlapped_share == pytest.approx(4 / 14)


def test_copies_for_gloo_on_a_gpu_are_separate() -> None:
    found = overlap_from_events(
        [
            event("sm90_gemm", 0, 10, gpu=0),
            event("Memcpy DtoH (Device -> Pinned)", 10, 12, gpu=0),
            event("gloo:all_reduce", 8, 30, thread=GLOO_THREAD, annotation=True),
        ],
        GPU,
    )
    assert (found.copies, found.compute, found.overlapped_ns) == ([(10, 12)], [(0, 10)], 2)


def test_sums_are_exact_and_intervals_are_reduced_for_figures() -> None:
    many = [event("aten::mm", 1000 * i, 1000 * i + 400) for i in range(1000)]
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
