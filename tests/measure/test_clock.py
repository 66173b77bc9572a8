"""Steps by phase and in rounds on the host clock, a collector that stays away, and time spent."""

import gc
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from functools import partial
from itertools import cycle, pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lmlab.measure import across_ranks, time_spent
from lmlab.measure import clock as module
from lmlab.measure.clock import PhaseClock, collector_paused, measure_steps
from lmlab.measure.rounds import MIN_ROUNDS, TimedStep, interleave, round_order


class FakeTime:
    """In place of the module `time`."""

    def __init__(self) -> None:
        self.now_ns = 0

    def pass_ms(self, milliseconds: float) -> None:
        self.now_ns += round(milliseconds * 1e6)

    def perf_counter(self) -> float:
        return self.now_ns / 1e9

    def perf_counter_ns(self) -> int:
        return self.now_ns


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


def test_a_phase_is_its_block_and_the_total_first_to_last_edge(time: FakeTime) -> None:
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
    "noisy": ([5, 15], {"max_steps": 20, "interval": 0.01}, 20, "step cap, median within 33.33%"),
    "out of time": ([5], {"time_cap_s": 0.024}, 2, "time cap of 0.024 s after 2 samples"),
    "no time at all": ([5], {"time_cap_s": 0.001, "warmup": 5}, 1, "time cap of 0.001 s after 1"),
    "cold": ([30, 5], {"warmup": 0}, 3, "3 samples"),
}


@pytest.mark.parametrize("case", STOPS)
def test_when_and_why_steps_stop(case: str, time: FakeTime) -> None:
    milliseconds, settings, n, stopped = STOPS[case]
    asked: dict[str, Any] = {"warmup": 0, "steps": 3, "time_cap_s": 600, **settings}
    total = measure_steps(steps_of(time, *milliseconds), device=CPU, **asked).phases["total"]
    assert (total.summary.n, total.stopped[: len(stopped)]) == (n, stopped)
    assert total.samples_ms[0] == milliseconds[0] + 5, "without warm-up, the cold step is a sample"


def test_a_phase_entered_twice_in_a_step_adds_up(time: FakeTime) -> None:
    def accumulate(clock: PhaseClock) -> None:
        for duration in (1, 2):
            with clock.phase("forward"):
                time.pass_ms(duration)

    phases = measure_steps(accumulate, device=CPU, warmup=0, steps=1, time_cap_s=10).phases
    assert phases["forward"].median_ms == 3


@pytest.mark.parametrize("names", [("outer", "inner"), ("total",), ()])
def test_a_step_that_cannot_be_timed_is_refused(names: tuple[str, ...]) -> None:
    def one_inside_another(clock: PhaseClock) -> None:
        with ExitStack() as stack:
            for name in names:
                stack.enter_context(clock.phase(name))

    with pytest.raises(ValueError, match=r"^(phase: |step timed)"):
        measure_steps(one_inside_another, device=CPU, warmup=0, steps=1, time_cap_s=1)


@pytest.mark.parametrize(
    "wrong",
    [{"warmup": -1}, {"steps": 0}, {"max_steps": 2}, {"interval": -0.1}, {"time_cap_s": 0.0}],
    ids=str,
)
def test_impossible_counts_are_refused_by_name(wrong: dict[str, float], time: FakeTime) -> None:
    asked: dict[str, Any] = {"warmup": 0, "steps": 3, "time_cap_s": 1, **wrong}
    with pytest.raises(ValueError, match=f"^{next(iter(wrong))} must be"):
        measure_steps(steps_of(time, 1), device=CPU, **asked)


@pytest.mark.parametrize("error", [None, RuntimeError("step failed")])
def test_the_collector_is_off_during_steps(error: Exception | None) -> None:
    gc.unfreeze()  # whatever a library has frozen
    seen = []

    def look(clock: PhaseClock) -> None:
        with clock.phase("forward"):
            seen.append((gc.isenabled(), gc.get_freeze_count() > 0))
            if error:
                raise error

    with pytest.raises(RuntimeError) if error else nullcontext():
        measure_steps(look, device=CPU, warmup=1, steps=1, time_cap_s=1)
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


def test_nested_measuring_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("time.perf_counter", lambda: now)
    monkeypatch.setattr(time_spent, "_LEDGER", ledger := time_spent._Ledger())
    monkeypatch.setattr(ledger, "dynamo_s", lambda: 0.0)
    with time_spent.measuring():
        now = 1.0
        with time_spent.measuring():
            now = 4.0
        ledger.on_triton(times=SimpleNamespace(total=1_500_000), cache_hit=False)
        ledger.on_triton(times=SimpleNamespace(total=9_000_000), cache_hit=True)
        now = 5.0
    now = 100.0
    assert time_spent.spent_s() == {"measuring": 3.5, "compiling": 1.5}


def test_the_order_of_the_variants_changes_from_round_to_round() -> None:
    orders = [round_order(["a", "b", "c"], number) for number in range(6)]
    assert all(sorted(order) == ["a", "b", "c"] for order in orders)
    assert {order[0] for order in orders} == {"a", "b", "c"}, "each starts a round"
    followed = {pair for order in orders for pair in pairwise(order)}
    assert len(followed) == 6, "each follows each other one"


@pytest.mark.parametrize(
    ("rounds", "cap_s", "measured", "stopped"),
    [(4, 600, 4, "4 samples"), (50, 1e-9, MIN_ROUNDS, "time cap of 1e-09 s after 3 samples")],
    ids=["warm-up rounds are discarded", "the time cap leaves enough for an interval"],
)
@pytest.mark.usefixtures("one_rank")
def test_interleave(rounds: int, cap_s: float, measured: int, stopped: str) -> None:
    log: list[str] = []

    def step(name: str, clock: PhaseClock) -> None:
        with clock.phase("step"):
            log.append(name)

    variants: dict[str, TimedStep] = {name: partial(step, name) for name in "ab"}
    found = interleave(variants, device=CPU, warmup=2, rounds=rounds, time_cap_s=cap_s)
    assert Counter(log) == {"a": 2 + measured, "b": 2 + measured}
    assert found.slowest("a").summary.n == measured
    assert found.stopped == stopped


@pytest.mark.parametrize(
    ("errors", "largest"), [([0.0, float("nan")], float("inf")), ([0.1, 0.3, 0.2], 0.3), ([], 0.0)]
)
def test_nan_is_the_largest_error(errors: list[float], largest: float) -> None:
    assert across_ranks.max_error(errors) == across_ranks.max_error(errors[::-1]) == largest
