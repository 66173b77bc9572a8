"""Steps by phase on the host clock, kernels by rule, and a garbage collector that stays away."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Iterator
from itertools import cycle
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lmlab.measure import clock as module
from lmlab.measure.clock import PhaseClock, collector_paused, measure_kernel, measure_steps
from lmlab.measure.stop_rule import StopRule
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


def test_a_kernel_on_a_cpu_is_timed_by_the_host_until_its_rule_is_met(time: FakeTime) -> None:
    durations = cycle([0.1, 0.5])
    found = measure_kernel(
        lambda: time.pass_ms(next(durations)), device=CPU, time_cap_s=600, max_samples=25
    )
    assert (found.clock, found.cache, found.stopped) == ("wall", "warm", "sample cap of 25")
    assert (found.summary.n, set(found.samples_ms)) == (25, {0.1, 0.5})
    slow = measure_kernel(lambda: time.pass_ms(200), device=CPU, time_cap_s=0.9)
    assert slow.stopped == "time cap of 0.9 s after 3 samples"


RULE = {
    "min_samples": 10,
    "min_time_s": 0.1,
    "target_relative_deviation": 0.005,
    "time_cap_s": 5.0,
    "max_samples": 1000,
}


def fed(samples_ms: list[float], **changes: Any) -> StopRule:
    rule = StopRule(**{**RULE, **changes})
    for sample in samples_ms:
        rule.add(sample)
    return rule


@pytest.mark.parametrize(
    ("samples_ms", "elapsed_s", "reason"),
    [
        pytest.param([20.0] * 9, 0.2, None, id="settled, too few samples"),
        pytest.param([20.0] * 10, 0.2, "relative deviation 0.00% after 10 samples", id="settled"),
        pytest.param([1.0] * 99, 4.0, None, id="settled, too little time"),
        pytest.param([20.0, 30.0] * 20, 4.9, None, id="noisy"),
        pytest.param([20.0, 30.0] * 20, 5.0, "time cap of 5 s after 40 samples", id="time cap"),
        pytest.param([], 99.0, None, id="always one sample"),
        pytest.param([0.01, 0.02] * 500, 0.1, "sample cap of 1000", id="sample cap"),
    ],
)
def test_when_and_why_sampling_of_a_kernel_stops(
    samples_ms: list[float], elapsed_s: float, reason: str | None
) -> None:
    assert fed(samples_ms).reason(elapsed_s) == reason


@given(st.lists(st.floats(1e-3, 1e4), min_size=2, max_size=50))
def test_the_running_deviation_is_the_sample_deviation_over_the_mean(samples: list[float]) -> None:
    expected = statistics.stdev(samples) / statistics.fmean(samples)
    assert fed(samples).relative_deviation == pytest.approx(expected, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("wrong", [{"min_samples": 0}, {"max_samples": 9}, {"time_cap_s": 0.0}])
def test_an_impossible_rule_is_refused_by_name(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=f"^{next(iter(wrong))} must be"):
        fed([], **wrong)


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
