"""Variants take turns, on one device or on several ranks; the slowest rank counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from lmlab.measure import across_ranks, kernel_rounds
from lmlab.measure.clock import PhaseClock
from lmlab.measure.kernel_rounds import SAMPLES_PER_TURN, SamplingBudget, measure_in_rounds
from lmlab.measure.rounds import MIN_ROUNDS, Rounds, TimedStep, interleave, round_order
from tests.measure.fake_time import FakeTime
from tests.measure.one_rank import group_of_one

CPU = torch.device("cpu")
NEVER_SETTLED = SamplingBudget(target_relative_deviation=0.0, max_samples=25, time_cap_s=100.0)


class Bench(FakeTime):
    """Variants on a fake clock, which only their calls advance, and a log of what ran."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[str] = []

    def variant(self, name: str, milliseconds: float = 1.0) -> Callable[[], Callable[[], None]]:
        def prepare() -> Callable[[], None]:
            self.log.append(f"prepare {name}")
            return call

        def call() -> None:
            self.log.append(name)
            self.pass_ms(milliseconds)

        return prepare


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    made = Bench()
    monkeypatch.setattr(kernel_rounds, "time", made)
    return made


def test_kernels_alternate_and_are_prepared_again_for_each_turn(bench: Bench) -> None:
    variants = {name: bench.variant(name) for name in "ab"}
    times, errors = measure_in_rounds(variants, device=CPU, budget=NEVER_SETTLED)
    assert errors == {}
    turns = [entry for entry in bench.log if entry.startswith("prepare")]
    assert turns == ["prepare a", "prepare b"] * 3, "25 samples, ten per turn"
    assert bench.log.count("a") == 25 + 3, "the first call of a turn is not a sample"
    for found in times.values():
        assert (found.clock, found.cache) == ("wall", "warm")
        assert found.samples_ms == pytest.approx([1.0] * 25)


def test_every_kernel_stops_by_its_own_rule(bench: Bench) -> None:
    variants = {"slow": bench.variant("slow", 60_000), "fast": bench.variant("fast")}
    times, _ = measure_in_rounds(variants, device=CPU, budget=NEVER_SETTLED)
    assert times["slow"].stopped == "time cap of 100 s after 1 sample"
    assert times["slow"].median_ms == 60_000
    assert times["fast"].stopped == "sample cap of 25"
    budget = SamplingBudget(min_samples=2, min_time_s=0.0, max_samples=50)
    times, _ = measure_in_rounds({"a": bench.variant("a")}, device=CPU, budget=budget)
    assert len(times["a"].samples_ms) == SAMPLES_PER_TURN
    assert times["a"].stopped.startswith("relative deviation")


def test_a_kernel_that_raises_is_dropped_and_its_error_returned(bench: Bench) -> None:
    def broken() -> Callable[[], None]:
        raise RuntimeError("out of tiles")

    variants = {"bad": broken, "good": bench.variant("good")}
    times, errors = measure_in_rounds(variants, device=CPU, budget=NEVER_SETTLED)
    assert list(times) == ["good"]
    assert str(errors["bad"]) == "out of tiles"
    assert errors["bad"].__traceback__ is None, "its frames would keep its tensors alive"


def test_the_order_of_the_variants_changes_from_round_to_round() -> None:
    orders = [round_order(["a", "b", "c"], number) for number in range(6)]
    assert all(sorted(order) == ["a", "b", "c"] for order in orders)
    assert {order[0] for order in orders} == {"a", "b", "c"}, "each starts a round"
    followed = {pair for order in orders for pair in pairwise(order)}
    assert len(followed) == 6, "each follows each other one"


@pytest.mark.parametrize(
    ("rounds", "cap_s", "measured", "stopped"),
    [
        (4, 600, 4, "4 samples"),
        (50, 1e-9, MIN_ROUNDS, "time cap of 1e-09 s after 3 samples"),
    ],
    ids=["warm-up rounds are discarded", "the time cap leaves enough for an interval"],
)
def test_ranks_measure_rounds(
    tmp_path: Path, rounds: int, cap_s: float, measured: int, stopped: str
) -> None:
    log: list[str] = []

    def logged(name: str) -> TimedStep:
        def step(clock: PhaseClock) -> None:
            with clock.phase("step"):
                log.append(name)

        return step

    with group_of_one(tmp_path):
        variants = {name: logged(name) for name in "ab"}
        found = interleave(variants, device=CPU, warmup=2, rounds=rounds, time_cap_s=cap_s)
    assert Counter(log) == {"a": 2 + measured, "b": 2 + measured}
    assert found.slowest("a").summary.n == measured
    assert found.stopped == stopped


def test_a_step_takes_as_long_as_its_slowest_rank() -> None:
    times = {"a": {"total": [[1.0, 5.0, 2.0], [3.0, 4.0, 2.5]]}}
    assert Rounds(samples_ms=times, stopped="").slowest("a").samples_ms == (3.0, 5.0, 2.5)


@pytest.mark.parametrize(
    ("errors", "largest"),
    [([0.0, float("nan")], float("inf")), ([0.1, 0.3, 0.2], 0.3), ([], 0.0)],
)
def test_nan_is_the_largest_error(errors: list[float], largest: float) -> None:
    assert across_ranks.max_error(errors) == across_ranks.max_error(errors[::-1]) == largest


def test_a_single_rank_gathers_its_own_value(tmp_path: Path) -> None:
    with group_of_one(tmp_path):
        assert across_ranks.gather({"a": 1}) == [{"a": 1}]
        assert across_ranks.max_over_ranks(2.0) == across_ranks.min_over_ranks(2.0) == 2.0
        assert across_ranks.ranks_per_device(CPU) == 1
