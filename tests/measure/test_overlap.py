"""A profiler's events sorted into computation and communication, and the share of both at once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.autograd import DeviceType

from lmlab.measure.overlap import MOST_INTERVALS, overlap_of, profile_overlap
from tests.measure.one_rank import group_of_one

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
MAIN, GLOO_THREAD = 1, 2


@dataclass
class Event:
    """The little of a profiler's event that is read."""

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


def test_on_a_cpu_operators_are_work_and_gloos_own_are_not() -> None:
    events = [
        Event("aten::mm", 0, 10),
        Event("aten::mul", 2, 4),
        Event("gloo:all_reduce", 5, 25, thread=GLOO_THREAD, annotation=True),
        Event("aten::div_", 20, 24, thread=GLOO_THREAD),
        Event("autograd::engine::evaluate_function", 0, 100),
        Event("aten::mm", 22, 30),
    ]
    found = overlap_of(events, CPU)
    assert found.compute == [(0, 10), (22, 30)]
    assert found.communication == [(5, 25)]
    assert found.overlapped_ns == 5 + 3
    assert found.overlapped_share == pytest.approx(8 / 20)
    assert found.seen_as == "gloo's messages"


def test_on_a_gpu_kernels_are_work_and_ncclas_are_messages() -> None:
    events = [
        Event("sm90_gemm", 0, 10, on_gpu=True),
        Event("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 6, 20, on_gpu=True),
        Event("nccl:all_reduce", 0, 99, on_gpu=True, annotation=True),
        Event("sm90_gemm", 0, 99, on_gpu=True, index=1),
        Event("aten::mm", 0, 99),
    ]
    found = overlap_of(events, GPU)
    assert found.compute == [(0, 10)]
    assert found.overlapped_share == pytest.approx(4 / 14)
    assert found.seen_as == "NCCL kernels"


def test_gloo_on_a_gpu_has_its_copies_in_a_row_of_their_own() -> None:
    events = [
        Event("sm90_gemm", 0, 10, on_gpu=True),
        Event("Memcpy DtoH (Device -> Pinned)", 10, 12, on_gpu=True),
        Event("gloo:all_reduce", 8, 30, thread=GLOO_THREAD, annotation=True),
    ]
    found = overlap_of(events, GPU)
    assert found.copies == [(10, 12)]
    assert found.compute == [(0, 10)]
    assert found.overlapped_ns == 2


def test_without_messages_there_is_no_share() -> None:
    found = overlap_of([Event("aten::mm", 0, 10)], CPU).to_json()
    assert found["overlapped_share"] is None
    assert found["seen_as"] is None


def test_sums_are_exact_and_pictures_are_thinned_out() -> None:
    many = [Event("aten::mm", 1000 * i, 1000 * i + 400) for i in range(1000)]
    found = overlap_of(many, CPU).to_json()
    assert found["compute_ms"] == pytest.approx(0.4)
    assert len(found["intervals_ms"]["compute"]) == MOST_INTERVALS
    assert found["intervals_ms"]["compute"][-1][1] == pytest.approx(0.9994, abs=1e-3)


def test_pytorchs_profiler_sees_gloos_messages(tmp_path: Path) -> None:
    with group_of_one(tmp_path):
        found = profile_overlap(lambda: dist.all_reduce(torch.ones(1000)), CPU)
    assert found.seen_as == "gloo's messages"
    assert found.compute
