"""Two all-reduce algorithms: what each rank sends, against a simulated ring."""

from __future__ import annotations

import math

import pytest

from lmlab.planning.rings import (
    break_even_bytes,
    gather_bytes,
    gather_steps,
    ring_bytes,
    ring_steps,
    seconds,
)


def simulate_ring(ranks: int) -> tuple[list[list[int]], int, int]:
    """All-reduce [rank] * ranks piece by piece: result, steps, pieces sent per rank."""
    held = [[rank] * ranks for rank in range(ranks)]
    steps = 0
    for adding in (True, False):
        for step in range(ranks - 1):
            first = 0 if adding else 1
            moving = [held[rank][(rank + first - step) % ranks] for rank in range(ranks)]
            for rank in range(ranks):
                target, piece = (rank + 1) % ranks, (rank + first - step) % ranks
                held[target][piece] = moving[rank] + (held[target][piece] if adding else 0)
            steps += 1
    return held, steps, steps  # one piece per step


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_a_ring_sends_one_piece_per_step(ranks: int) -> None:
    held, steps, pieces = simulate_ring(ranks)
    assert held == [[sum(range(ranks))] * ranks] * ranks
    assert ring_steps(ranks) == steps
    assert ring_bytes(1.0, ranks) == pytest.approx(pieces / ranks)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_whole_tensors_take_half_the_steps_and_more_bytes(
    ranks: int,
) -> None:
    assert gather_steps(ranks) * 2 == ring_steps(ranks)
    assert gather_bytes(3.0, ranks) == pytest.approx(ring_bytes(3.0, ranks) * ranks / 2)


def test_time_is_latency_per_step_plus_bytes_over_bandwidth() -> None:
    assert seconds(200, 6, latency_s=0.5, bytes_per_s=100) == 5


def test_whole_tensors_are_faster_up_to_the_break_even_size() -> None:
    # 4 ranks: V / W (1 - 2/4) = latency, V = 2 * 0.5 s * 100 B/s.
    link = {"latency_s": 0.5, "bytes_per_s": 100.0}
    size = break_even_bytes(4, **link)
    assert size == 100
    ring = seconds(ring_bytes(size, 4), ring_steps(4), **link)
    assert seconds(gather_bytes(size, 4), gather_steps(4), **link) == pytest.approx(ring)
    assert break_even_bytes(2, **link) == math.inf
