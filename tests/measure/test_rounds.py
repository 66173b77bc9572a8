"""Arms take turns in an order that changes, and the slowest rank decides."""

from __future__ import annotations

import time
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from lmlab.measure.clock import PhaseClock
from lmlab.measure.rounds import FEWEST_ROUNDS, Arm, Rounds, interleave, order_of
from tests.measure.one_rank import group_of_one

CPU = torch.device("cpu")


def test_every_round_runs_every_arm_once() -> None:
    for number in range(8):
        assert sorted(order_of(["a", "b", "c"], number)) == ["a", "b", "c"]


def test_no_arm_always_follows_the_same_other() -> None:
    followed = Counter(
        pair
        for number in range(6)
        for order in [order_of(["a", "b", "c"], number)]
        for pair in pairwise(order)
    )
    assert len(followed) == 6, "each of three arms follows each other one"


def test_every_arm_starts_a_round() -> None:
    assert {order_of(["a", "b", "c"], number)[0] for number in range(6)} == {"a", "b", "c"}


def recording(name: str, seen: list[str], seconds: float = 0.0) -> Arm:
    def step(clock: PhaseClock) -> None:
        with clock.phase("step"):
            seen.append(name)
            time.sleep(seconds)

    return step


def test_warm_up_rounds_are_run_and_thrown_away(tmp_path: Path) -> None:
    seen: list[str] = []
    with group_of_one(tmp_path):
        arms = {name: recording(name, seen) for name in "ab"}
        rounds = interleave(arms, device=CPU, warmup=2, rounds=4, time_cap_s=60)
    assert Counter(seen) == {"a": 6, "b": 6}
    assert rounds.slowest("a").summary.n == 4
    assert rounds.stopped == "4 samples"


def test_a_cap_ends_the_rounds_but_leaves_enough_for_an_interval(tmp_path: Path) -> None:
    with group_of_one(tmp_path):
        arms = {"a": recording("a", [], 0.002)}
        rounds = interleave(arms, device=CPU, warmup=1, rounds=50, time_cap_s=1e-6)
    assert rounds.slowest("a").summary.n == FEWEST_ROUNDS
    assert rounds.stopped == "time cap of 1e-06 s after 3 samples"


def test_a_step_is_as_slow_as_its_slowest_rank() -> None:
    times = {"a": {"total": [[1.0, 5.0, 2.0], [3.0, 4.0, 2.5]]}}
    assert Rounds(samples_ms=times, stopped="").slowest("a").samples_ms == (3.0, 5.0, 2.5)


def test_an_arm_that_raises_is_not_swallowed(tmp_path: Path) -> None:
    def broken(clock: PhaseClock) -> None:
        raise RuntimeError("no")

    with group_of_one(tmp_path), pytest.raises(RuntimeError, match="no"):
        interleave({"a": broken}, device=CPU, warmup=0, rounds=1, time_cap_s=1)
