"""Arms take turns, each until it has enough; one that breaks does not stop the others."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch

from lmlab.measure.race import SAMPLES_A_TURN, Patience, measure_in_rounds

CPU = torch.device("cpu")


def counted(log: list[str], name: str, seconds: float = 0.0) -> Callable[[], Callable[[], None]]:
    def prepare() -> Callable[[], None]:
        log.append(f"prepare {name}")

        def call() -> None:
            log.append(name)
            time.sleep(seconds)

        return call

    return prepare


def never_settled(**changes: float) -> Patience:
    return Patience(**{"target_relative_deviation": 0.0, "max_samples": 25, **changes})  # type: ignore[arg-type]


def test_arms_take_turns_and_each_turn_is_prepared_anew() -> None:
    log: list[str] = []
    arms = {name: counted(log, name) for name in "ab"}
    times, broken = measure_in_rounds(arms, device=CPU, patience=never_settled())
    assert broken == {}
    turns = [entry for entry in log if entry.startswith("prepare")]
    assert turns == ["prepare a", "prepare b"] * 3, "25 samples, ten a turn"
    assert {name: len(time.samples_ms) for name, time in times.items()} == {"a": 25, "b": 25}


def test_the_first_call_of_a_turn_is_no_sample() -> None:
    log: list[str] = []
    patience = never_settled(max_samples=SAMPLES_A_TURN)
    measure_in_rounds({"a": counted(log, "a")}, device=CPU, patience=patience)
    assert log.count("a") == SAMPLES_A_TURN + 1


def test_a_slow_arm_is_capped_and_says_so() -> None:
    log: list[str] = []
    arms = {"slow": counted(log, "slow", 0.6), "fast": counted(log, "fast")}
    times, _ = measure_in_rounds(arms, device=CPU, patience=never_settled(time_cap_s=0.5))
    assert times["slow"].stopped == "time cap of 0.5 s after 1 sample"
    assert times["slow"].median_ms >= 600
    assert len(times["fast"].samples_ms) > 1


def test_an_arm_that_has_settled_sits_out() -> None:
    log: list[str] = []
    quiet = Patience(min_samples=2, min_time_s=0.0, target_relative_deviation=10.0, max_samples=50)
    times, _ = measure_in_rounds({"a": counted(log, "a")}, device=CPU, patience=quiet)
    assert len(times["a"].samples_ms) == SAMPLES_A_TURN
    assert "relative deviation" in times["a"].stopped


def test_an_arm_that_breaks_leaves_the_race_to_the_others() -> None:
    log: list[str] = []

    def breaks() -> Callable[[], None]:
        raise RuntimeError("out of tiles")

    arms = {"bad": breaks, "good": counted(log, "good")}
    times, broken = measure_in_rounds(arms, device=CPU, patience=never_settled())
    assert list(times) == ["good"]
    assert str(broken["bad"]) == "out of tiles"
    assert broken["bad"].__traceback__ is None, "its frames would keep its tensors"


def test_on_a_cpu_the_clock_is_the_hosts_and_the_cache_warm() -> None:
    times, _ = measure_in_rounds({"a": counted([], "a")}, device=CPU, patience=never_settled())
    assert (times["a"].clock, times["a"].cache) == ("host", "warm")


def test_no_arm_no_time() -> None:
    assert measure_in_rounds({}, device=CPU, patience=Patience()) == ({}, {})


@pytest.mark.parametrize("samples", [0, 5])
def test_fewer_samples_than_the_least_are_refused(samples: int) -> None:
    with pytest.raises(ValueError, match="samples"):
        measure_in_rounds(
            {"a": counted([], "a")}, device=CPU, patience=Patience(max_samples=samples)
        )
