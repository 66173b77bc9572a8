"""Profiler events as intervals: device time by phase, computation and communication."""

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity

from lmlab.measure.device_time import busy_times, by_phase, device_times, graph_replay_records
from lmlab.measure.intervals import Interval, length, profiled_events, reduced, union
from lmlab.measure.overlap import MAX_INTERVALS, overlap_from_events, profile_overlap

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
MAIN, GLOO_THREAD = 1, 2


def event(name: str, start: int, end: int, **more: Any) -> Any:
    """The part of a profiler event that is used: methods, times in nanoseconds."""
    gpu = more.get("gpu")
    answers = {
        **{"name": name, "start_ns": start, "duration_ns": end - start, "device_index": gpu or 0},
        "device_type": DeviceType.CPU if gpu is None else DeviceType.CUDA,
        "start_thread_id": more.get("thread", MAIN),
        "is_user_annotation": more.get("annotation", False),
    }
    return SimpleNamespace(**{key: lambda answer=answer: answer for key, answer in answers.items()})


def test_the_fake_has_the_methods_of_a_real_event() -> None:
    (real, *_) = profiled_events(lambda: torch.ones(2) + 1, CPU, [ProfilerActivity.CPU])
    assert [name for name in vars(event("k", 0, 1)) if not callable(getattr(real, name))] == []


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


def in_ms(name: str, start: int, end: int, **more: Any) -> Any:
    return event(name, start * 10**6, end * 10**6, **more)


STEPS: dict[str, tuple[torch.device, list[Any], dict[str, Any]]] = {
    "operators, but not those of gloo's threads": (
        CPU,
        [
            in_ms("aten::mm", 0, 10),
            in_ms("aten::mul", 2, 4),
            in_ms("gloo:all_reduce", 5, 25, thread=GLOO_THREAD, annotation=True),
            in_ms("aten::div_", 20, 24, thread=GLOO_THREAD),
            in_ms("autograd::engine::evaluate_function", 0, 100),
            in_ms("aten::mm", 22, 30),
        ],
        {"compute": [[0, 10], [22, 30]], "communication": [[5, 25]], "overlapped_ms": 5 + 3},
    ),
    "NCCL's kernels": (
        GPU,
        [
            in_ms("sm90_gemm", 0, 10, gpu=0),
            in_ms("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 6, 20, gpu=0),
            in_ms("nccl:all_reduce", 0, 99, gpu=0, annotation=True),
            in_ms("sm90_gemm", 0, 99, gpu=1),
            in_ms("aten::mm", 0, 99),
        ],
        {"compute": [[0, 10]], "communication": [[6, 20]], "overlapped_ms": 4},
    ),
    "copies for gloo on a GPU": (
        GPU,
        [
            in_ms("sm90_gemm", 0, 10, gpu=0),
            in_ms("Memcpy DtoH (Device -> Pinned)", 10, 12, gpu=0),
            in_ms("gloo:all_reduce", 8, 30, thread=GLOO_THREAD, annotation=True),
        ],
        {"compute": [[0, 10]], "copies": [[10, 12]], "overlapped_ms": 2},
    ),
}


@pytest.mark.parametrize(("device", "events", "expected"), STEPS.values(), ids=STEPS)
def test_kinds_of_events(device: torch.device, events: list[Any], expected: dict[str, Any]) -> None:
    found = overlap_from_events(events, device)
    both = {**found, **found["intervals_ms"]}
    assert {key: both[key] for key in expected} == expected
    share = found["overlapped_ms"] / found["communication_ms"]
    assert found["overlapped_share"] == pytest.approx(share)
    has_nccl = any(each.name().startswith("ncclDev") for each in events)
    assert found["seen_as"] == ("NCCL kernels" if has_nccl else "gloo's messages")


def test_sums_are_exact_and_intervals_are_reduced_for_figures() -> None:
    many = [event("aten::mm", 1000 * i, 1000 * i + 400) for i in range(1000)]
    found = overlap_from_events(many, CPU)
    assert found["compute_ms"] == pytest.approx(0.4)
    assert len(found["intervals_ms"]["compute"]) == MAX_INTERVALS
    assert found["intervals_ms"]["compute"][-1][1] == pytest.approx(0.9994, abs=1e-3)
    assert (found["overlapped_share"], found["seen_as"]) == (None, None), "no messages"


def test_the_real_profiler_sees_gloos_messages(one_rank: None) -> None:
    found = profile_overlap(lambda: dist.all_reduce(torch.ones(1000)), CPU)
    assert found["seen_as"] == "gloo's messages"
    assert found["compute_ms"] > 0


@pytest.mark.gpu
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


INTERVALS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=12)


def ticks(intervals: list[Interval]) -> set[int]:
    return {tick for start, end in intervals for tick in range(start, end)}


@given(intervals=INTERVALS)
def test_a_union_is_disjoint_and_covers_the_same(intervals: list[Interval]) -> None:
    joined = union(intervals)
    assert ticks(joined) == ticks(intervals)
    assert length(intervals) == len(ticks(intervals))
    assert all(one[1] < other[0] for one, other in pairwise(joined))


@given(intervals=INTERVALS, most=st.integers(1, 5))
def test_reduced_intervals_are_few_or_the_union(intervals: list[Interval], most: int) -> None:
    joined, chosen = union(intervals), reduced(intervals, most)
    assert len(chosen) == min(most, len(joined))
    assert len(joined) > most or chosen == joined


def test_the_shortest_gap_is_closed_or_interval_dropped_first() -> None:
    assert reduced([(0, 10), (11, 20), (50, 60), (63, 70)], 2) == [(0, 20), (50, 70)]
    work = [(0, 1000), *((start, start + 1) for start in range(2000, 9000, 100))]
    assert length(reduced(work, 10)) < 1.1 * length(work)
