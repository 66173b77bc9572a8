"""Busy time is a union of intervals: overlaps count once, gaps not at all."""

from __future__ import annotations

import time
from dataclasses import dataclass
from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.autograd import DeviceType

from lmlab.measure.gpu_busy import busy_ms, union_ms, work_intervals

INTERVALS = st.lists(
    st.tuples(st.integers(0, 200), st.integers(0, 40)).map(lambda pair: (pair[0], sum(pair))),
    max_size=30,
)


@given(INTERVALS)
def test_the_union_counts_every_covered_nanosecond_once(intervals: list[tuple[int, int]]) -> None:
    covered = {tick for start, end in intervals for tick in range(start, end)}
    assert union_ms(intervals) == pytest.approx(len(covered) / 1e6)


@given(INTERVALS, st.randoms())
def test_the_order_of_intervals_does_not_matter(
    intervals: list[tuple[int, int]], random: Random
) -> None:
    shuffled = random.sample(intervals, len(intervals))
    assert union_ms(shuffled) == union_ms(intervals)


@given(INTERVALS, st.tuples(st.integers(0, 200), st.integers(201, 240)))
def test_another_interval_never_makes_it_less_and_adds_at_most_itself(
    intervals: list[tuple[int, int]], extra: tuple[int, int]
) -> None:
    more = union_ms([*intervals, extra])
    assert union_ms(intervals) <= more <= union_ms(intervals) + (extra[1] - extra[0]) / 1e6 + 1e-12


@pytest.mark.parametrize(
    ("intervals", "expected_ms"),
    [
        pytest.param([], 0.0, id="nothing"),
        pytest.param([(0, 1_000_000), (3_000_000, 4_000_000)], 2.0, id="a-gap"),
        pytest.param([(0, 2_000_000), (1_000_000, 3_000_000)], 3.0, id="two-streams-overlap"),
        pytest.param([(0, 9_000_000), (1_000_000, 2_000_000)], 9.0, id="one-inside-another"),
    ],
)
def test_busy_milliseconds(intervals: list[tuple[int, int]], expected_ms: float) -> None:
    assert union_ms(intervals) == expected_ms


@dataclass
class FakeEvent:
    """A profiler event as Kineto gives it: methods, times in nanoseconds."""

    kind: DeviceType = DeviceType.CUDA
    index: int = 0
    annotation: bool = False

    def device_type(self) -> DeviceType:
        return self.kind

    def device_index(self) -> int:
        return self.index

    def is_user_annotation(self) -> bool:
        return self.annotation

    def start_ns(self) -> int:
        return 5

    def duration_ns(self) -> int:
        return 3


@pytest.mark.parametrize(
    ("event", "intervals"),
    [
        pytest.param(FakeEvent(), [(5, 8)], id="a-kernel"),
        pytest.param(FakeEvent(kind=DeviceType.CPU), [], id="a-launch-on-the-host"),
        pytest.param(FakeEvent(index=1), [], id="another-gpu"),
        pytest.param(FakeEvent(annotation=True), [], id="a-range-drawn-on-the-gpu"),
    ],
)
def test_only_work_of_this_gpu_counts(event: FakeEvent, intervals: list[tuple[int, int]]) -> None:
    assert work_intervals([event], device_index=0) == intervals


def test_a_real_profilers_event_has_what_is_asked_of_it() -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        torch.ones(2) + 1
    assert profiler.profiler is not None
    assert profiler.profiler.kineto_results is not None
    event = profiler.profiler.kineto_results.events()[0]
    for question in (
        "device_type",
        "device_index",
        "is_user_annotation",
        "start_ns",
        "duration_ns",
    ):
        assert callable(getattr(event, question))


def test_a_cpu_has_no_gpu_to_be_busy() -> None:
    assert busy_ms(lambda: torch.ones(2) + 1, torch.device("cpu")) is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
class TestOnAGpu:
    """Busy time of real kernels."""

    device = torch.device("cuda", 0)

    def test_a_gpu_is_busy_for_some_but_not_more_than_the_time_that_passes(self) -> None:
        a = torch.randn(4096, 4096, device="cuda")
        a @ a
        started = time.perf_counter()
        busy = busy_ms(lambda: [a @ a for _ in range(5)], self.device)
        wall_ms = (time.perf_counter() - started) * 1e3
        assert busy is not None
        assert 0 < busy <= wall_ms

    def test_sleeping_on_the_host_between_kernels_is_not_busy(self) -> None:
        a = torch.randn(1024, 1024, device="cuda")
        a @ a

        def with_gaps() -> None:
            with torch.profiler.record_function("a range over everything"):
                for _ in range(3):
                    a @ a
                    torch.cuda.synchronize()
                    time.sleep(0.02)

        busy = busy_ms(with_gaps, self.device)
        assert busy is not None
        assert 0 < busy < 20
