"""Steps by phase on the host clock, kernels by rule, and a garbage collector that stays away."""

from __future__ import annotations

import gc
import time

import pytest
import torch

from lmlab.measure.clock import PhaseClock, collector_paused, measure_kernel, measure_steps

CPU = torch.device("cpu")


def wait_ms(milliseconds: float) -> None:
    end = time.perf_counter() + milliseconds / 1e3
    while time.perf_counter() < end:
        pass


def two_phases(clock: PhaseClock) -> None:
    with clock.phase("forward"):
        wait_ms(2)
    with clock.phase("backward"):
        wait_ms(4)


def test_every_phase_and_the_total_get_as_many_samples_as_steps() -> None:
    times = measure_steps(two_phases, device=CPU, warmup=2, steps=3, time_cap_s=600)
    assert list(times.phases) == ["forward", "backward", "total"]
    assert {m.summary.n for m in times.phases.values()} == {3}
    assert {name: len(samples) for name, samples in times.warmup_ms.items()} == {
        "forward": 2,
        "backward": 2,
        "total": 2,
    }
    forward = times.phases["forward"]
    assert (forward.clock, forward.cache, forward.stopped) == ("wall", "warm", "3 samples")


def test_a_phase_takes_as_long_as_its_block_and_the_total_as_long_as_all() -> None:
    phases = measure_steps(two_phases, device=CPU, warmup=0, steps=3, time_cap_s=600).phases
    assert phases["forward"].summary.minimum >= 2
    assert phases["backward"].summary.minimum >= 4
    for forward, backward, total in zip(
        *(phases[name].samples_ms for name in ("forward", "backward", "total")), strict=True
    ):
        assert total >= forward + backward


def test_without_warm_up_the_cold_first_step_is_the_first_sample() -> None:
    calls = 0

    def cold_then_warm(clock: PhaseClock) -> None:
        nonlocal calls
        calls += 1
        with clock.phase("forward"):
            wait_ms(30 if calls == 1 else 1)

    times = measure_steps(cold_then_warm, device=CPU, warmup=0, steps=4, time_cap_s=600)
    samples = times.phases["forward"].samples_ms
    assert len(samples) == 4
    assert samples[0] >= 30
    assert times.warmup_ms == {"forward": [], "total": []}


def test_the_time_cap_keeps_what_was_measured_and_says_so() -> None:
    times = measure_steps(two_phases, device=CPU, warmup=1, steps=1000, time_cap_s=0.05)
    total = times.phases["total"]
    assert 1 <= total.summary.n < 12
    assert total.stopped.startswith(f"time cap of 0.05 s after {total.summary.n} sample")


def test_a_cap_that_ends_the_warm_up_still_gives_one_sample() -> None:
    times = measure_steps(two_phases, device=CPU, warmup=5, steps=10, time_cap_s=0.001)
    assert times.phases["total"].stopped == "time cap of 0.001 s after 1 sample and 1 of 5 warm-ups"
    assert times.phases["total"].summary.n == 1


def test_a_phase_entered_twice_in_a_step_adds_up() -> None:
    def accumulate(clock: PhaseClock) -> None:
        for _ in range(3):
            with clock.phase("forward"):
                wait_ms(1)

    phases = measure_steps(accumulate, device=CPU, warmup=0, steps=1, time_cap_s=10).phases
    assert phases["forward"].median_ms >= 3


def nested(clock: PhaseClock) -> None:
    with clock.phase("outer"), clock.phase("inner"):
        pass


def named_total(clock: PhaseClock) -> None:
    with clock.phase("total"):
        pass


def without_phase(clock: PhaseClock) -> None:
    del clock


@pytest.mark.parametrize("step", [nested, named_total, without_phase])
def test_a_step_that_cannot_be_timed_is_refused(step: object) -> None:
    with pytest.raises(ValueError, match=r"^(phase: |step timed)"):
        measure_steps(step, device=CPU, warmup=0, steps=1, time_cap_s=1)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("warmup", "steps", "cap", "key"),
    [(-1, 1, 1.0, "warmup"), (0, 0, 1.0, "steps"), (0, 1, 0.0, "time_cap_s")],
    ids=["negative-warm-up", "no-steps", "no-time"],
)
def test_impossible_counts_are_refused_by_name(
    warmup: int, steps: int, cap: float, key: str
) -> None:
    with pytest.raises(ValueError, match=f"^{key} must be"):
        measure_steps(two_phases, device=CPU, warmup=warmup, steps=steps, time_cap_s=cap)


def test_the_collector_is_off_and_frozen_during_steps_and_back_afterwards() -> None:
    seen = []

    def look(clock: PhaseClock) -> None:
        with clock.phase("forward"):
            seen.append((gc.isenabled(), gc.get_freeze_count() > 0))

    measure_steps(look, device=CPU, warmup=1, steps=1, time_cap_s=1)
    assert seen == [(False, True), (False, True)]
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0


def test_the_collector_is_back_after_a_step_that_fails() -> None:
    def fail(clock: PhaseClock) -> None:
        with clock.phase("forward"):
            raise RuntimeError("step failed")

    with pytest.raises(RuntimeError, match="step failed"):
        measure_steps(fail, device=CPU, warmup=0, steps=1, time_cap_s=1)
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0


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


def test_a_kernel_on_a_cpu_is_timed_by_the_host_with_a_warm_cache() -> None:
    measurement = measure_kernel(
        lambda: wait_ms(1), device=CPU, min_time_s=0.02, time_cap_s=600, max_samples=50
    )
    assert (measurement.clock, measurement.cache) == ("wall", "warm")
    assert measurement.summary.n >= 10
    assert measurement.summary.minimum >= 1


def test_a_slow_kernel_stops_at_its_cap_with_the_samples_it_has() -> None:
    measurement = measure_kernel(lambda: wait_ms(20), device=CPU, time_cap_s=0.1)
    assert 1 <= measurement.summary.n < 10
    assert measurement.stopped.startswith("time cap of 0.1 s after")


def test_a_restless_kernel_takes_no_more_than_the_most_samples() -> None:
    calls = 0

    def restless() -> None:
        nonlocal calls
        calls += 1
        wait_ms(0.1 if calls % 2 else 0.5)

    measurement = measure_kernel(
        restless, device=CPU, min_samples=4, max_samples=25, time_cap_s=600
    )
    assert measurement.summary.n == 25
    assert measurement.stopped == "sample cap of 25"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
class TestOnAGpu:
    """The GPU's clock against independent ones."""

    def test_a_matmul_takes_what_triton_says_it_takes(self) -> None:
        from triton.testing import do_bench

        a, b = (torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        ours = measure_kernel(lambda: a @ b, device=torch.device("cuda", 0))
        theirs = do_bench(lambda: a @ b, return_mode="median")
        assert (ours.clock, ours.cache) == ("events", "cold")
        assert ours.median_ms == pytest.approx(theirs, rel=0.1)

    def test_launch_latency_is_not_kernel_time(self) -> None:
        x = torch.randn(1024, device="cuda")
        tiny = measure_kernel(lambda: x.mul_(1.0), device=torch.device("cuda", 0), time_cap_s=1)
        assert tiny.median_ms < 0.010

    def test_a_flushed_cache_is_slower_than_a_warm_one(self) -> None:
        x = torch.randn(2**21, device="cuda")  # 8 MiB: fits any recent L2
        y = torch.empty_like(x)
        times = [
            measure_kernel(
                lambda: torch.neg(x, out=y),
                device=torch.device("cuda", 0),
                flush_cache=flush,
                time_cap_s=1,
            ).median_ms
            for flush in (True, False)
        ]
        assert times[0] > times[1]

    def test_a_step_waits_for_the_gpu(self) -> None:
        a = torch.randn(8192, 8192, device="cuda")

        def step(clock: PhaseClock) -> None:
            with clock.phase("forward"):
                a @ a

        device = torch.device("cuda", 0)
        host = measure_steps(step, device=device, warmup=3, steps=5, time_cap_s=10)
        events = measure_kernel(lambda: a @ a, device=device, time_cap_s=2)
        assert host.phases["forward"].median_ms == pytest.approx(events.median_ms, rel=0.1)
