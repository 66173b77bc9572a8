"""Variants take turns until each has enough samples; one that raises does not stop the others."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from lmlab.measure import kernel_rounds
from lmlab.measure.kernel_rounds import SAMPLES_PER_TURN, SamplingBudget, measure_in_rounds
from tests.measure.fake_time import FakeTime

CPU = torch.device("cpu")
NEVER_SETTLED = SamplingBudget(target_relative_deviation=0.0, max_samples=25, time_cap_s=100.0)


class Bench(FakeTime):
    """Variants on a fake clock, which only their calls advance, and a log of what ran."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[str] = []

    def variant(self, name: str, seconds: float = 0.001) -> Callable[[], Callable[[], None]]:
        def prepare() -> Callable[[], None]:
            self.log.append(f"prepare {name}")
            return call

        def call() -> None:
            self.log.append(name)
            self.pass_ms(1e3 * seconds)

        return prepare


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    made = Bench()
    monkeypatch.setattr(kernel_rounds, "time", made)
    return made


def test_variants_alternate_and_are_prepared_again_for_each_turn(bench: Bench) -> None:
    variants = {name: bench.variant(name) for name in "ab"}
    times, errors = measure_in_rounds(variants, device=CPU, budget=NEVER_SETTLED)
    assert errors == {}
    turns = [entry for entry in bench.log if entry.startswith("prepare")]
    assert turns == ["prepare a", "prepare b"] * 3, "25 samples, ten per turn"
    assert {name: len(time.samples_ms) for name, time in times.items()} == {"a": 25, "b": 25}
    assert bench.log.count("a") == 25 + 3, "the first call of a turn is not a sample"
    assert (times["a"].clock, times["a"].cache) == ("wall", "warm")
    assert times["a"].samples_ms == pytest.approx([1.0] * 25)


def test_every_variant_stops_by_its_own_rule(bench: Bench) -> None:
    variants = {"slow": bench.variant("slow", 60.0), "fast": bench.variant("fast")}
    times, _ = measure_in_rounds(variants, device=CPU, budget=NEVER_SETTLED)
    assert times["slow"].stopped == "time cap of 100 s after 1 sample"
    assert times["slow"].median_ms == 60_000
    assert times["fast"].stopped == "sample cap of 25"
    budget = SamplingBudget(min_samples=2, min_time_s=0.0, max_samples=50)
    times, _ = measure_in_rounds({"a": bench.variant("a")}, device=CPU, budget=budget)
    assert len(times["a"].samples_ms) == SAMPLES_PER_TURN
    assert times["a"].stopped.startswith("relative deviation")


def test_a_variant_that_raises_is_dropped_and_its_error_returned(bench: Bench) -> None:
    def broken() -> Callable[[], None]:
        raise RuntimeError("out of tiles")

    variants = {"bad": broken, "good": bench.variant("good")}
    times, errors = measure_in_rounds(variants, device=CPU, budget=NEVER_SETTLED)
    assert list(times) == ["good"]
    assert str(errors["bad"]) == "out of tiles"
    assert errors["bad"].__traceback__ is None, "its frames would keep its tensors alive"
