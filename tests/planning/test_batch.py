"""Minimum batch sizes, against values computed by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lmlab.planning.batch import (
    Mesh,
    Network,
    best_fsdp,
    block_times,
    max_tensor_parallel,
    min_tokens_exposed,
    min_tokens_overlapped,
    min_tokens_per_device,
)

V5P = Network(flops_per_s=4.6e14, bytes_per_s=1.8e11)
MESH = Mesh(fsdp=16, tp=4, fsdp_axes=2, tp_axes=1)
D_MODEL, D_FF = 16384, 53248
# Intensity of 10 FLOPs per byte.
SMALL = Network(flops_per_s=1000.0, bytes_per_s=100.0)


def test_block_times_by_hand() -> None:
    # 2 x 2 devices, 8 tokens, D = 3, F = 5.
    times = block_times(SMALL, Mesh(fsdp=2, tp=2), d_model=3, d_ff=5, tokens=8)
    assert times.compute == pytest.approx(4 * 8 * 15 / (4 * 1000))
    assert times.weights == pytest.approx(4 * 15 / 2 / 100)
    assert times.activations == pytest.approx(4 * 8 * 3 / 2 / 100)


def test_a_mesh_dimension_of_one_device_sends_nothing() -> None:
    alone = block_times(SMALL, Mesh(fsdp=1, tp=1), d_model=3, d_ff=5, tokens=8)
    assert (alone.weights, alone.activations) == (0, 0)
    assert min_tokens_overlapped(SMALL, Mesh(fsdp=1, tp=1), d_ff=5) == 0
    assert min_tokens_exposed(SMALL, Mesh(fsdp=1, tp=1), d_ff=5) == 0


def test_fsdp_16_by_tp_4_on_v5p_by_hand() -> None:
    # 4.6e14 / 1.8e11 = 2555.6 FLOPs per byte; 16 * 2555.6 / 2 = 20444 tokens, 319 per device.
    assert V5P.intensity == pytest.approx(2555.56, abs=0.01)
    tokens = min_tokens_overlapped(V5P, MESH, d_ff=D_FF)
    assert tokens is not None
    assert tokens == pytest.approx(20444.4, abs=0.1)
    assert tokens / MESH.devices == pytest.approx(319.4, abs=0.1)
    # Activations take 4 * 2555.6 / 53248 = 0.192 of the compute time.
    assert min_tokens_exposed(V5P, MESH, d_ff=D_FF) == pytest.approx(20444.4 / (1 - 0.19198), 1e-4)
    assert max_tensor_parallel(V5P, d_ff=D_FF) == pytest.approx(20.8, abs=0.05)


@pytest.mark.parametrize("mesh", [MESH, Mesh(fsdp=64, tp=1), Mesh(fsdp=8, tp=8, tp_axes=2)])
def test_at_the_minimum_batch_computing_and_gathering_take_equally_long(mesh: Mesh) -> None:
    tokens = min_tokens_overlapped(V5P, mesh, d_ff=D_FF)
    assert tokens is not None
    times = block_times(V5P, mesh, d_model=D_MODEL, d_ff=D_FF, tokens=tokens)
    assert times.compute == pytest.approx(times.weights)
    assert times.activations <= times.compute


@pytest.mark.parametrize("mesh", [MESH, Mesh(fsdp=2, tp=16)])
def test_exposed_messages_together_take_as_long_as_computing(mesh: Mesh) -> None:
    tokens = min_tokens_exposed(V5P, mesh, d_ff=D_FF)
    assert tokens is not None
    times = block_times(V5P, mesh, d_model=D_MODEL, d_ff=D_FF, tokens=tokens)
    assert times.compute == pytest.approx(times.weights + times.activations)


def test_no_batch_hides_too_much_tensor_parallelism() -> None:
    # 10 FLOPs per byte, F = 40: up to 4 devices.
    assert max_tensor_parallel(SMALL, d_ff=40) == 4
    assert min_tokens_overlapped(SMALL, Mesh(fsdp=2, tp=4), d_ff=40) == 20
    assert min_tokens_overlapped(SMALL, Mesh(fsdp=2, tp=5), d_ff=40) is None
    assert min_tokens_overlapped(SMALL, Mesh(fsdp=2, tp=5, tp_axes=2), d_ff=40) == 20
    assert min_tokens_exposed(SMALL, Mesh(fsdp=2, tp=4), d_ff=40) is None


def test_half_the_bytes_per_weight_need_half_the_batch() -> None:
    assert min_tokens_overlapped(SMALL, Mesh(fsdp=4, tp=1), d_ff=40) == 40
    assert min_tokens_overlapped(SMALL, Mesh(fsdp=4, tp=1), d_ff=40, weight_bytes=1) == 20


def test_the_best_split_hides_both_messages_exactly() -> None:
    devices = 64
    tokens = devices * min_tokens_per_device(V5P, d_ff=D_FF, fsdp_axes=2)
    # 2555.6^2 / (2 * 53248) = 61.3 per device.
    assert tokens / devices == pytest.approx(61.3, abs=0.05)
    fsdp = best_fsdp(tokens, devices, d_ff=D_FF, fsdp_axes=2)
    mesh = replace(MESH, fsdp=fsdp, tp=devices / fsdp)  # type: ignore[arg-type]
    times = block_times(V5P, mesh, d_model=D_MODEL, d_ff=D_FF, tokens=tokens)
    assert times.weights == pytest.approx(times.compute)
    assert times.activations == pytest.approx(times.compute)


def test_if_tensor_parallelism_is_never_hidden_fsdp_alone_is_best() -> None:
    # 10 FLOPs per byte, F = 4: not even a degree of 1 is hidden.
    assert min_tokens_per_device(SMALL, d_ff=4) == 10
    assert min_tokens_per_device(SMALL, d_ff=40) == 2.5
