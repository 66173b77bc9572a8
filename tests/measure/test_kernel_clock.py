"""Kernels by the GPU's clock or the host's, alone or in turns, until a rule is satisfied."""

import statistics
from collections.abc import Callable
from contextlib import nullcontext
from itertools import cycle
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lmlab.measure import kernel_clock
from lmlab.measure.clock import PhaseClock, measure_steps
from lmlab.measure.kernel_clock import SAMPLES_PER_TURN, measure_in_rounds, measure_kernel
from lmlab.measure.stop_rule import SamplingBudget, StopRule
from tests.measure.test_clock import FakeTime

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
MIB = 2**20
NEVER_SETTLED = SamplingBudget(target_relative_deviation=0.0, max_samples=25, time_cap_s=100.0)


class Bench(FakeTime):
    """Variants on a fake clock, which only their calls advance, and a log of what ran."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[str] = []

    def variant(self, name: str, *milliseconds: float) -> Callable[[], Callable[[], None]]:
        durations = cycle(milliseconds or (1.0,))

        def prepare() -> Callable[[], None]:
            self.log.append(f"prepare {name}")
            return call

        def call() -> None:
            self.log.append(name)
            self.pass_ms(next(durations))

        return prepare


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    made = Bench()
    monkeypatch.setattr(kernel_clock, "time", made)
    return made


def test_a_kernel_on_a_cpu_is_timed_by_the_host_until_its_rule_is_met(bench: Bench) -> None:
    noisy = bench.variant("noisy", 0.1, 0.5)()
    found = measure_kernel(noisy, device=CPU, time_cap_s=600, max_samples=25)
    assert (found.clock, found.cache, found.stopped) == ("wall", "warm", "sample cap of 25")
    assert (found.summary.n, set(found.samples_ms)) == (25, {0.1, 0.5})
    slow = measure_kernel(bench.variant("slow", 200)(), device=CPU, time_cap_s=0.9)
    assert slow.stopped == "time cap of 0.9 s after 4 samples"


def test_kernels_alternate_and_are_prepared_again_for_each_turn(bench: Bench) -> None:
    variants = {name: bench.variant(name) for name in "ab"}
    times, errors = measure_in_rounds(variants, device=CPU, budget=NEVER_SETTLED)
    assert errors == {}
    turns = [entry for entry in bench.log if entry.startswith("prepare")]
    assert turns == ["prepare a", "prepare b"] * 3, "25 samples, ten per turn"
    assert bench.log.count("a") == 25 + 3, "the first call of a turn is not a sample"
    for found in times.values():
        assert (found.clock, found.cache, found.samples_ms) == ("wall", "warm", (1.0,) * 25)


def test_every_kernel_stops_by_its_own_rule(bench: Bench) -> None:
    variants = {"slow": bench.variant("slow", 60_000), "fast": bench.variant("fast")}
    times, _ = measure_in_rounds(variants, device=CPU, budget=NEVER_SETTLED)
    assert times["slow"].stopped == "time cap of 100 s after 1 sample"
    assert (times["slow"].median_ms, times["fast"].stopped) == (60_000, "sample cap of 25")
    budget = SamplingBudget(min_samples=2, min_time_s=0.0, max_samples=50)
    times, _ = measure_in_rounds({"a": bench.variant("a")}, device=CPU, budget=budget)
    assert len(times["a"].samples_ms) == SAMPLES_PER_TURN
    assert times["a"].stopped.startswith("relative deviation")


def test_a_kernel_that_raises_is_dropped_and_its_error_returned(bench: Bench) -> None:
    broken = Mock(side_effect=RuntimeError("out of tiles"))
    variants = {"bad": broken, "good": bench.variant("good")}
    times, errors = measure_in_rounds(variants, device=CPU, budget=NEVER_SETTLED)
    assert list(times) == ["good"]
    assert str(errors["bad"]) == "out of tiles"
    assert errors["bad"].__traceback__ is None, "its frames would keep its tensors alive"


def test_the_cache_is_flushed_before_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    queue: list[str] = []

    def log(entry: str) -> Any:
        return lambda *_: queue.append(entry)

    def buffer(size: int, **_: Any) -> Any:
        queue.append(f"buffer of {size // MIB} MiB")
        return SimpleNamespace(zero_=log("flush"))

    cuda = SimpleNamespace(
        Event=lambda enable_timing: SimpleNamespace(
            record=log("event"), elapsed_time=lambda end: 1.5 * enable_timing
        ),
        synchronize=log("synchronize"),
        device=nullcontext,
        _sleep=log("sleep"),
        get_device_properties=lambda device: SimpleNamespace(L2_cache_size=200 * MIB),
    )
    fake = SimpleNamespace(cuda=cuda, empty=buffer, uint8=torch.uint8)
    monkeypatch.setattr(kernel_clock, "torch", fake)
    sampler = kernel_clock.EventSampler(log("call"), GPU)
    assert "buffer of 400 MiB" in queue, "twice the L2"
    queue.clear()
    assert sampler(2) == [1.5, 1.5]
    assert queue == ["flush", "sleep", "event", "call", "event"] * 2 + ["synchronize"]


def fed(samples_ms: list[float], **changes: Any) -> StopRule:
    limits = {"min_time_s": 0.1, "target_relative_deviation": 0.005, "time_cap_s": 5.0}
    rule = StopRule(SamplingBudget(**{"max_samples": 1000, **limits, **changes}))
    for sample in samples_ms:
        rule.add(sample)
    return rule


@pytest.mark.parametrize(
    ("samples_ms", "elapsed_s", "reason"),
    [
        *(([20.0] * 9, 0.2, None), ([20.0] * 10, 0.2, "relative deviation 0.00% after 10 samples")),
        ([1.0] * 99, 4.0, None),  # settled, but too little time
        ([20.0, 30.0] * 20, 4.9, None),
        ([20.0, 30.0] * 20, 5.0, "time cap of 5 s after 40 samples"),
        *(([], 99.0, None), ([0.01, 0.02] * 500, 0.1, "sample cap of 1000")),
    ],
)
def test_when_sampling_stops(samples_ms: list[float], elapsed_s: float, reason: str | None) -> None:
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
class TestOnAGpu:
    """The GPU's clock against independent ones."""

    def test_a_matmul_takes_what_triton_says_it_takes(self) -> None:
        from triton.testing import do_bench

        a, b = (torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        ours = measure_kernel(lambda: a @ b, device=GPU)
        theirs = do_bench(lambda: a @ b, return_mode="median")
        assert (ours.clock, ours.cache) == ("events", "cold")
        assert ours.median_ms == pytest.approx(theirs, rel=0.1)

    def test_launch_latency_is_not_kernel_time(self) -> None:
        x = torch.randn(1024, device="cuda")
        assert measure_kernel(lambda: x.mul_(1.0), device=GPU, time_cap_s=1).median_ms < 0.010

    def test_a_flushed_cache_is_slower(self, monkeypatch: pytest.MonkeyPatch) -> None:
        x = torch.randn(2**21, device="cuda")  # 8 MiB: fits any recent L2
        y = torch.empty_like(x)

        def fastest() -> float:
            found = measure_kernel(lambda: torch.neg(x, out=y), device=GPU, time_cap_s=1)
            return found.summary.min  # a late host adds to the others

        cold = fastest()
        monkeypatch.setattr(kernel_clock, "_flush_buffer", lambda device: y[:1])
        assert cold > fastest()

    def test_a_step_waits_for_the_gpu(self) -> None:
        """The GPU's own events lie inside the phase, whatever else runs on it."""
        a = torch.randn(8192, 8192, device="cuda")
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        inside: list[float] = []

        def step(clock: PhaseClock) -> None:
            with clock.phase("forward"):
                start.record()
                a @ a
                end.record()
            assert end.query()
            inside.append(start.elapsed_time(end))

        host = measure_steps(step, device=GPU, warmup=0, steps=5, time_cap_s=10)
        assert all(
            gpu <= wall for gpu, wall in zip(inside, host.phases["forward"].samples_ms, strict=True)
        )
