"""Memory, rings, and bounds on batch and devices: by hand, and where computing outlasts sending."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmlab.planning import batch, memory
from lmlab.planning.batch import FeedForward, Mesh, Network, Pass, Scheme, block_times
from lmlab.planning.rings import all_reduce

V5P = Network(flops_per_s=4.6e14, bytes_per_s=1.8e11)
MESH = Mesh(fsdp=16, tp=4, fsdp_axes=2, tp_axes=1)
XXL = FeedForward(d_model=16384, d_ff=53248)
TALL = FeedForward(d_model=8, d_ff=40)
SWIGLU = FeedForward(d_model=4, d_ff=100, matrices=3)
SMALL = Network(flops_per_s=1000.0, bytes_per_s=100.0)  # 10 FLOPs per byte
BLOCKS = st.builds(
    FeedForward,
    d_model=st.integers(1, 10**5),
    d_ff=st.integers(1, 10**6),
    matrices=st.sampled_from([2, 3]),
)
NETWORKS = st.builds(Network, flops_per_s=st.floats(1e10, 1e16), bytes_per_s=st.floats(1e6, 1e12))
TOKENS = st.floats(1, 1e9)


def test_block_times_by_hand() -> None:
    # 2 x 2 devices, 8 tokens, D = 3, F = 5.
    times = block_times(SMALL, Mesh(fsdp=2, tp=2), FeedForward(d_model=3, d_ff=5), 8)
    by_hand = (4 * 8 * 15 / (4 * 1000), 4 * 15 / 2 / 100, 4 * 8 * 3 / 2 / 100)
    assert tuple(times.values()) == pytest.approx(by_hand)


@pytest.mark.parametrize("matrices", [2, 3])
@pytest.mark.parametrize("mesh", [MESH, Mesh(fsdp=64, tp=2), Mesh(fsdp=8, tp=8, tp_axes=2)])
def test_at_the_minimum_batch_computing_equals_sending(mesh: Mesh, matrices: int) -> None:
    block = replace(XXL, matrices=matrices)
    hidden = batch.min_tokens_overlapped(V5P, mesh, block) or 0
    exposed = batch.min_tokens_exposed(V5P, mesh, block) or 0
    assert 0 < hidden < exposed
    times = block_times(V5P, mesh, block, hidden)
    assert times["compute"] == pytest.approx(times["weights"])
    assert times["activations"] <= times["compute"]
    times = block_times(V5P, mesh, block, exposed)
    assert times["compute"] == pytest.approx(times["weights"] + times["activations"])


@pytest.mark.parametrize(
    ("mesh", "overlapped", "exposed"),
    [
        # 10 FLOPs per byte, F = 40: tensor parallelism is hidden on up to 4 devices per axis.
        (Mesh(fsdp=1, tp=1), 0, 0),
        (Mesh(fsdp=4, tp=1), 40, 40),
        (Mesh(fsdp=2, tp=4), 20, None),
        (Mesh(fsdp=2, tp=5), None, None),
        (Mesh(fsdp=2, tp=4, tp_axes=2), 20, 40),
    ],
)
def test_minimum_batch_by_hand(mesh: Mesh, overlapped: float | None, exposed: float | None) -> None:
    assert batch.min_tokens_overlapped(SMALL, mesh, TALL) == overlapped
    assert batch.min_tokens_exposed(SMALL, mesh, TALL) == exposed


def test_what_lowers_the_batch() -> None:
    assert batch.min_tokens_overlapped(SMALL, Mesh(fsdp=4, tp=1), TALL, weight_bytes=1) == 20
    # The best split needs intensity^2 / F; with F = 4 not even TP of 1 is hidden.
    assert batch.min_tokens_per_device(SMALL, TALL) == 2.5
    assert batch.min_tokens_per_device(SMALL, replace(TALL, d_ff=4)) == 10


@pytest.mark.parametrize(
    ("scheme", "direction", "sent", "devices"),
    [
        # B = 50, D F = 400, 10 FLOPs per byte: 6 B D F = 120,000 FLOPs forward.
        ("data parallel", "forward", 0, float("inf")),
        ("data parallel", "backward", 12 * 400, 5),
        ("FSDP", "forward", 6 * 400, 5),
        ("tensor parallel", "forward", 4 * 50 * 4, 15),
        ("tensor parallel", "backward", 4 * 50 * 4, 30),
    ],
)
def test_swiglu_by_hand(scheme: Scheme, direction: Pass, sent: float, devices: float) -> None:
    assert batch.message_bytes(SWIGLU, scheme, direction, 50) == sent
    assert batch.max_devices(SMALL, SWIGLU, scheme, direction, 50) == pytest.approx(devices)


@given(NETWORKS, BLOCKS, TOKENS, st.booleans())
def test_the_best_split_fills_the_computation_and_no_other_does_better(
    network: Network, block: FeedForward, tokens: float, overlapped: bool
) -> None:
    devices = batch.max_mesh_devices(network, block, tokens, overlapped=overlapped)
    best = batch.best_fsdp(tokens, devices, block)

    def messages(degree: float) -> float:
        weights = block.weight_bytes * degree / devices
        activations = block.activation_bytes(tokens) / degree
        sent = max(weights, activations) if overlapped else weights + activations
        return sent / network.bytes_per_s

    compute = block.flops(tokens) / (devices * network.flops_per_s)
    assert messages(best) == pytest.approx(compute)
    assert messages(best) <= min(messages(0.8 * best), messages(1.25 * best)) * (1 + 1e-9)


def test_the_best_split_equals_both_messages_on_any_axes() -> None:
    fsdp = batch.best_fsdp(4096, 64, XXL, fsdp_axes=2, tp_axes=3)
    times = block_times(V5P, Mesh(fsdp=fsdp, tp=64 / fsdp, fsdp_axes=2, tp_axes=3), XXL, 4096)
    assert times["weights"] == pytest.approx(times["activations"])


# One block of 2 x 3: 12 parameters; the inputs of its layers are 2 and 3 numbers per token.
ONE_BLOCK = memory.Blocks(d_model=2, d_ff=3, num_blocks=1)
XXL_BLOCKS = memory.Blocks(d_model=16384, d_ff=53248, num_blocks=126)


def test_state_is_sixteen_bytes_per_parameter() -> None:
    state = memory.training_state(ONE_BLOCK)
    assert state == {"master_weights": 48, "gradients": 48, "optimizer": 96}
    assert sum(state.values()) == 16 * 12
    totals = [sum(parts.values()) for parts in memory.BYTES_PER_PARAMETER.values()]
    assert totals == [16, 16, 18], "master weights cost what 16-bit weights and gradients save"


def test_what_is_not_sharded_is_replicated() -> None:
    assert memory.sharded_bytes(100, 40, 4, share=0.5) == (100 + 20) / 4 + 20
    assert memory.sharded_bytes(100, 40, 4, share=1.0) == 35
    assert [memory.devices_for(total, 80) for total in (1, 80, 81)] == [1, 1, 2]


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
    state = sum(memory.training_state(XXL_BLOCKS).values())
    saved = XXL_BLOCKS.activation_bytes_per_token * tokens
    assert memory.min_devices(state, saved, 95e9, share=0.5) == devices
    if devices:
        assert memory.sharded_bytes(state, saved, devices, share=0.5) <= 95e9
        assert memory.sharded_bytes(state, saved, devices - 1, share=0.5) > 95e9


@pytest.mark.parametrize(("ranks", "steps", "tensors"), [(2, 2, 1.0), (4, 6, 1.5), (8, 14, 1.75)])
def test_a_ring_sends_one_piece_per_step_and_whole_tensors_half_as_many(
    ranks: int, steps: int, tensors: float
) -> None:
    assert all_reduce(ranks) == {"ring": (steps, tensors), "whole tensors": (steps / 2, ranks - 1)}
