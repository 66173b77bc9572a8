"""RoPE turns neighbouring pairs, and what attention sees of positions is their distance."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lmlab.model.rope import RotaryEmbedding, rotate

CONTEXT = 64


def rotated_at(rope: RotaryEmbedding, x: torch.Tensor, position: int) -> torch.Tensor:
    """The vector x as it would come out at one position."""
    cos, sin = rope.tables(position + 1, x.dtype)
    return rotate(x.expand(position + 1, -1), cos, sin)[position]


@settings(deadline=None, max_examples=40)
@given(
    pairs=st.integers(1, 8),
    query_at=st.integers(0, 31),
    key_at=st.integers(0, 31),
    shift=st.integers(0, 32),
    theta=st.sampled_from([10.0, 1e4, 5e5]),
    seed=st.integers(0, 1000),
)
def test_scores_depend_on_the_distance_alone(
    pairs: int, query_at: int, key_at: int, shift: int, theta: float, seed: int
) -> None:
    rope = RotaryEmbedding(2 * pairs, CONTEXT, theta, dtype=torch.float64)
    q, k = torch.randn(
        2, 2 * pairs, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )

    here = rotated_at(rope, q, query_at) @ rotated_at(rope, k, key_at)
    there = rotated_at(rope, q, query_at + shift) @ rotated_at(rope, k, key_at + shift)

    torch.testing.assert_close(here, there)


def test_each_neighbouring_pair_is_turned_by_its_own_angle() -> None:
    rope = RotaryEmbedding(4, CONTEXT, theta=100.0)
    x = torch.tensor([1.0, 0.0, 0.0, 1.0])

    turned = rotated_at(rope, x, 3)

    fast, slow = 3.0, 3.0 / math.sqrt(100.0)
    expected = [math.cos(fast), math.sin(fast), -math.sin(slow), math.cos(slow)]
    assert turned.tolist() == pytest.approx(expected, abs=1e-6)


def test_position_zero_is_not_turned() -> None:
    rope = RotaryEmbedding(8, CONTEXT, theta=1e4)
    x = torch.randn(8)

    assert torch.equal(rotated_at(rope, x, 0), x)


def test_lengths_are_kept() -> None:
    rope = RotaryEmbedding(8, CONTEXT, theta=1e4, dtype=torch.float64)
    q = torch.randn(2, CONTEXT, 8, dtype=torch.float64)

    turned, _ = rope(q, q)

    torch.testing.assert_close(turned.norm(dim=-1), q.norm(dim=-1))


def test_queries_and_keys_are_turned_alike() -> None:
    rope = RotaryEmbedding(8, CONTEXT, theta=1e4)
    x = torch.randn(2, 3, 10, 8)

    q, k = rope(x, x)

    assert torch.equal(q, k)


def test_far_positions_keep_their_precision() -> None:
    rope = RotaryEmbedding(2, 100_001, theta=1e4)

    assert rope.cos[100_000, 0].item() == pytest.approx(math.cos(100_000), abs=1e-7)


def test_16_bit_activations_stay_16_bit() -> None:
    rope = RotaryEmbedding(8, CONTEXT, theta=1e4)
    x = torch.randn(4, 8, dtype=torch.bfloat16)

    q, k = rope(x, x)

    assert (q.dtype, k.dtype) == (torch.bfloat16, torch.bfloat16)


def test_the_tables_are_not_part_of_a_checkpoint() -> None:
    assert RotaryEmbedding(8, CONTEXT, theta=1e4).state_dict() == {}
