"""Two all-reduce algorithms: what each rank sends, against a simulated ring."""

import pytest

from lmlab.planning.rings import gather_bytes, gather_steps, ring_bytes, ring_steps


def simulate_ring(ranks: int) -> tuple[list[list[int]], int]:
    """All-reduce [rank] * ranks piece by piece, one per step: the result and the steps."""
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
    return held, steps


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_a_ring_sends_one_piece_per_step_and_whole_tensors_half_as_many(ranks: int) -> None:
    held, steps = simulate_ring(ranks)
    assert held == [[sum(range(ranks))] * ranks] * ranks
    assert ring_steps(ranks) == steps
    assert ring_bytes(1.0, ranks) == pytest.approx(steps / ranks)
    assert gather_steps(ranks) * 2 == ring_steps(ranks)
    assert gather_bytes(3.0, ranks) == pytest.approx(ring_bytes(3.0, ranks) * ranks / 2)
