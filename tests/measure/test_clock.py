"""Steps by phase on the host clock, kernels by rule, and a garbage collector that stays away."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from itertools import cycle
from typing import Any

import pytest
import torch

from lmlab.measure import clock as module
from lmlab.measure.clock import PhaseClock, collector_paused, measure_kernel, measure_steps
from tests.measure.fake_time import FakeTime

CPU = torch.device("cpu")
Step = Callable[[PhaseClock], None]


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> FakeTime:
    fake = FakeTime()
    monkeypatch.setattr(module, "time", fake)
    return fake


def steps_of(time: FakeTime, *milliseconds: float) -> Step:
    """Steps whose forward takes these times in turn and whose backward takes 4 ms; 1 ms passes
    before, between and after them."""
    durations: Iterator[float] = cycle(milliseconds)

    def step(clock: PhaseClock) -> None:
        for name, duration in (("forward", next(durations)), ("backward", 4.0)):
            time.pass_ms(1)
            with clock.phase(name):
                time.pass_ms(duration)
        time.pass_ms(1)

    return step


def test_a_phase_takes_as_long_as_its_block_and_the_total_from_first_to_last_edge(
    time: FakeTime,
) -> None:
    times = measure_steps(steps_of(time, 30, 2, 3), device=CPU, warmup=1, steps=2, time_cap_s=600)
    assert {name: found.samples_ms for name, found in times.phases.items()} == {
        "forward": (2, 3),
        "backward": (4, 4),
        "total": (7, 8),
    }
    assert times.warmup_ms == {"forward": [30], "backward": [4], "total": [35]}
    assert {(found.clock, found.cache) for found in times.phases.values()} == {("wall", "warm")}


STOPS = {
    "as many as asked for": ([5], {}, 3, "3 samples"),
    "settled": ([5], {"max_steps": 50, "interval": 0.01}, 6, "median within 0.00% after 6 samples"),
    "noisy": (
        *([5, 15], {"max_steps": 20, "interval": 0.01}, 20),
        "step cap, median within 33.33% after 20 samples",
    ),
    "out of time": ([5], {"time_cap_s": 0.024}, 2, "time cap of 0.024 s after 2 samples"),
    "no time at all": (
        *([5], {"time_cap_s": 0.001, "warmup": 5}, 1),
        "time cap of 0.001 s after 1 sample and 1 of 5 warm-ups",
    ),
    "cold": ([30, 5], {"warmup": 0}, 3, "3 samples"),
}


@pytest.mark.parametrize("case", STOPS)
def test_when_and_why_steps_stop(case: str, time: FakeTime) -> None:
    milliseconds, settings, n, stopped = STOPS[case]
    asked: dict[str, Any] = {"warmup": 0, "steps": 3, "time_cap_s": 600, **settings}
    total = measure_steps(steps_of(time, *milliseconds), device=CPU, **asked).phases["total"]
    assert (total.summary.n, total.stopped) == (n, stopped)
    assert total.samples_ms[0] == milliseconds[0] + 5, "without warm-up, the cold step is a sample"


def test_a_phase_entered_twice_in_a_step_adds_up(time: FakeTime) -> None:
    def accumulate(clock: PhaseClock) -> None:
        for duration in (1, 2):
            with clock.phase("forward"):
                time.pass_ms(duration)

    phases = measure_steps(accumulate, device=CPU, warmup=0, steps=1, time_cap_s=10).phases
    assert phases["forward"].median_ms == 3


def nested(clock: PhaseClock) -> None:
    with clock.phase("outer"), clock.phase("inner"):
        pass


def named_total(clock: PhaseClock) -> None:
    with clock.phase("total"):
        pass


def without_phase(clock: PhaseClock) -> None:
    del clock


@pytest.mark.parametrize("step", [nested, named_total, without_phase])
def test_a_step_that_cannot_be_timed_is_refused(step: Step) -> None:
    with pytest.raises(ValueError, match=r"^(phase: |step timed)"):
        measure_steps(step, device=CPU, warmup=0, steps=1, time_cap_s=1)


@pytest.mark.parametrize(
    "wrong",
    [{"warmup": -1}, {"steps": 0}, {"max_steps": 2}, {"interval": -0.1}, {"time_cap_s": 0.0}],
    ids=str,
)
def test_impossible_counts_are_refused_by_name(wrong: dict[str, float], time: FakeTime) -> None:
    asked: dict[str, Any] = {"warmup": 0, "steps": 3, "time_cap_s": 1, **wrong}
    with pytest.raises(ValueError, match=f"^{next(iter(wrong))} must be"):
        measure_steps(steps_of(time, 1), device=CPU, **asked)


@pytest.mark.parametrize("fails", [False, True])
def test_the_collector_is_off_and_frozen_during_steps_and_back_afterwards(fails: bool) -> None:
    seen = []

    def look(clock: PhaseClock) -> None:
        with clock.phase("forward"):
            seen.append((gc.isenabled(), gc.get_freeze_count() > 0))
            if fails:
                raise RuntimeError("step failed")

    try:
        measure_steps(look, device=CPU, warmup=1, steps=1, time_cap_s=1)
    except RuntimeError:
        assert fails
    assert set(seen) == {(False, True)}
    assert (gc.isenabled(), gc.get_freeze_count()) == (True, 0)


def test_a_collector_that_was_off_or_frozen_before_stays_so() -> None:
    gc.disable()
    gc.freeze()
    try:
        with collector_paused():
            pass
        assert not gc.isenabled()
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()
        gc.enable()


KERNELS = {
    "settled": ([20], {"min_time_s": 0.02}, 10, "relative deviation 0.00% after 10 samples"),
    "slow": ([200], {"time_cap_s": 0.9}, 3, "time cap of 0.9 s after 3 samples"),
    "restless": ([0.1, 0.5], {"max_samples": 25}, 25, "sample cap of 25"),
}


@pytest.mark.parametrize("case", KERNELS)
def test_a_kernel_on_a_cpu_is_timed_by_the_host_until_a_rule_is_met(
    case: str, time: FakeTime
) -> None:
    milliseconds, settings, n, stopped = KERNELS[case]
    durations = cycle(milliseconds)
    asked: dict[str, Any] = {"time_cap_s": 600, **settings}
    found = measure_kernel(lambda: time.pass_ms(next(durations)), device=CPU, **asked)
    assert (found.clock, found.cache) == ("wall", "warm")
    assert (found.summary.n, found.stopped) == (n, stopped)
    assert set(found.samples_ms) == set(map(float, milliseconds))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
class TestOnAGpu:
    """The GPU's clock against independent ones."""

    device = torch.device("cuda", 0)

    def test_a_matmul_takes_what_triton_says_it_takes(self) -> None:
        from triton.testing import do_bench

        a, b = (torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        ours = measure_kernel(lambda: a @ b, device=self.device)
        theirs = do_bench(lambda: a @ b, return_mode="median")
        assert (ours.clock, ours.cache) == ("events", "cold")
        assert ours.median_ms == pytest.approx(theirs, rel=0.1)

    def test_launch_latency_is_not_kernel_time(self) -> None:
        x = torch.randn(1024, device="cuda")
        tiny = measure_kernel(lambda: x.mul_(1.0), device=self.device, time_cap_s=1)
        assert tiny.median_ms < 0.010

    def test_a_flushed_cache_is_slower_than_a_warm_one(self) -> None:
        x = torch.randn(2**21, device="cuda")  # 8 MiB: fits any recent L2
        y = torch.empty_like(x)
        cold, warm = (
            measure_kernel(
                lambda: torch.neg(x, out=y), device=self.device, flush_cache=flush, time_cap_s=1
            )
            for flush in (True, False)
        )
        assert cold.summary.minimum > warm.summary.minimum, "a late host adds to the others"

    def test_a_step_waits_for_the_gpu(self) -> None:
        a = torch.randn(8192, 8192, device="cuda")

        def step(clock: PhaseClock) -> None:
            with clock.phase("forward"):
                a @ a

        host = measure_steps(step, device=self.device, warmup=3, steps=5, time_cap_s=10)
        events = measure_kernel(lambda: a @ a, device=self.device, time_cap_s=2)
        assert host.phases["forward"].median_ms == pytest.approx(events.median_ms, rel=0.1)
