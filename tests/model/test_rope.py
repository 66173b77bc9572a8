"""RoPE rotates adjacent pairs, so that attention depends on the distance of positions."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lmlab.model.rope import RotaryEmbedding, rotate

CONTEXT = 64


def rotated_at(rope: RotaryEmbedding, x: torch.Tensor, position: int) -> torch.Tensor:
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
def test_scores_depend_on_the_distance_only(
    pairs: int, query_at: int, key_at: int, shift: int, theta: float, seed: int
) -> None:
    rope = RotaryEmbedding(2 * pairs, CONTEXT, theta, dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    q, k = torch.randn(2, 2 * pairs, generator=generator, dtype=torch.float64)
    here = rotated_at(rope, q, query_at) @ rotated_at(rope, k, key_at)
    there = rotated_at(rope, q, query_at + shift) @ rotated_at(rope, k, key_at + shift)
    torch.testing.assert_close(here, there)


def test_each_adjacent_pair_is_rotated_by_its_own_angle() -> None:
    rope = RotaryEmbedding(4, CONTEXT, theta=100.0)
    x = torch.tensor([1.0, 0.0, 0.0, 1.0])
    fast, slow = 3.0, 3.0 / math.sqrt(100.0)
    expected = [math.cos(fast), math.sin(fast), -math.sin(slow), math.cos(slow)]
    assert rotated_at(rope, x, 3).tolist() == pytest.approx(expected, abs=1e-6)
    assert torch.equal(rotated_at(rope, x, 0), x)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_queries_and_keys_are_rotated_alike_in_their_dtype(dtype: torch.dtype) -> None:
    rope = RotaryEmbedding(8, CONTEXT, theta=1e4, dtype=torch.float64)
    x = torch.randn(2, 3, CONTEXT, 8, dtype=dtype)
    q, k = rope(x, x)
    assert torch.equal(q, k)
    assert q.dtype == dtype
    if dtype == torch.float64:
        torch.testing.assert_close(q.norm(dim=-1), x.norm(dim=-1))


def test_tables_are_precise_at_far_positions_and_not_part_of_a_checkpoint() -> None:
    rope = RotaryEmbedding(2, 100_001, theta=1e4)
    assert rope.cos[100_000, 0].item() == pytest.approx(math.cos(100_000), abs=1e-7)
    assert rope.state_dict() == {}
