"""Variants alternate in a changing order, and the slowest rank counts."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from pathlib import Path

import torch

from lmlab.measure.clock import PhaseClock
from lmlab.measure.rounds import MIN_ROUNDS, Rounds, TimedStep, interleave, round_order
from tests.measure.one_rank import group_of_one

CPU = torch.device("cpu")


def test_the_order_of_the_variants_changes_from_round_to_round() -> None:
    orders = [round_order(["a", "b", "c"], number) for number in range(6)]
    assert all(sorted(order) == ["a", "b", "c"] for order in orders)
    assert {order[0] for order in orders} == {"a", "b", "c"}, "each starts a round"
    followed = {pair for order in orders for pair in pairwise(order)}
    assert len(followed) == 6, "each follows each other one"


def logged(name: str, log: list[str]) -> TimedStep:
    def step(clock: PhaseClock) -> None:
        with clock.phase("step"):
            log.append(name)

    return step


def test_warm_up_rounds_are_discarded(tmp_path: Path) -> None:
    log: list[str] = []
    variants = {name: logged(name, log) for name in "ab"}
    with group_of_one(tmp_path):
        rounds = interleave(variants, device=CPU, warmup=2, rounds=4, time_cap_s=600)
    assert Counter(log) == {"a": 6, "b": 6}
    assert rounds.slowest("a").summary.n == 4
    assert rounds.stopped == "4 samples"


def test_the_time_cap_leaves_enough_rounds_for_an_interval(tmp_path: Path) -> None:
    with group_of_one(tmp_path):
        variants = {"a": logged("a", [])}
        rounds = interleave(variants, device=CPU, warmup=1, rounds=50, time_cap_s=1e-9)
    assert rounds.slowest("a").summary.n == MIN_ROUNDS
    assert rounds.stopped == "time cap of 1e-09 s after 3 samples"


def test_a_step_takes_as_long_as_its_slowest_rank() -> None:
    times = {"a": {"total": [[1.0, 5.0, 2.0], [3.0, 4.0, 2.5]]}}
    assert Rounds(samples_ms=times, stopped="").slowest("a").samples_ms == (3.0, 5.0, 2.5)
