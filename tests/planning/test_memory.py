"""Memory of a stack of feed-forward blocks, against values computed by hand."""

import pytest

from lmlab.planning.memory import (
    BYTES_PER_PARAMETER,
    Blocks,
    activation_bytes,
    devices_for,
    min_devices,
    sharded_bytes,
    training_state,
)

# One block of 2 x 3: 12 parameters; the inputs of its layers are 2 and 3 numbers per token.
SMALL = Blocks(d_model=2, d_ff=3, num_blocks=1)
XXL = Blocks(d_model=16384, d_ff=53248, num_blocks=126)


def test_a_block_has_two_matrices_and_saves_their_inputs() -> None:
    assert SMALL.parameters == 2 * 2 * 3
    assert activation_bytes(SMALL, 10) == 10 * (2 + 3) * 2


def test_state_is_sixteen_bytes_per_parameter() -> None:
    state = training_state(SMALL)
    assert (state.master_weights, state.gradients, state.optimizer) == (48, 48, 96)
    assert state.total == 16 * 12
    totals = [sum(parts.values()) for parts in BYTES_PER_PARAMETER.values()]
    assert totals == [16, 16, 18], "master weights cost what 16-bit weights and gradients save"


def test_what_is_not_sharded_is_replicated() -> None:
    assert sharded_bytes(100, 40, 4, share=0.5) == (100 + 20) / 4 + 20
    assert sharded_bytes(100, 40, 4, share=1.0) == 35
    assert [devices_for(total, 80) for total in (1, 80, 81)] == [1, 1, 2]


@pytest.mark.parametrize(
    ("tokens", "devices"),
    [
        # state / 95 GB = 37.03
        (0, 38),
        # 4096 tokens save 71.87 GB: (3517.58 + 35.94) / (95 - 35.94) = 60.2
        (4096, 61),
        # 10828 tokens save 190.002 GB, half of which does not fit on a device
        (10828, None),
    ],
)
def test_the_minimum_number_of_devices(tokens: int, devices: int | None) -> None:
    state, saved = training_state(XXL).total, activation_bytes(XXL, tokens)
    assert min_devices(state, saved, 95e9, share=0.5) == devices
    if devices:
        assert sharded_bytes(state, saved, devices, share=0.5) <= 95e9
        assert sharded_bytes(state, saved, devices - 1, share=0.5) > 95e9
