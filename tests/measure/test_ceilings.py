"""Measured ceilings: rates from median times, or a reason instead of a number."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

import pytest
import torch

from lmlab.measure import ceilings
from lmlab.measure.ceilings import Plan, copy_ceiling, matmul_ceiling, measure_ceilings

CPU = torch.device("cpu")
PLAN = Plan(matmul_sides={}, copy_bytes=2**20, time_cap_s=1.0, min_time_s=0.01)
Times = Callable[..., Iterator[float]]


@pytest.fixture
def times_ms(monkeypatch: pytest.MonkeyPatch) -> Times:
    """Replaces measuring by given median times; returns those that were not used."""

    def use(*milliseconds: float) -> Iterator[float]:
        left = iter(milliseconds)
        monkeypatch.setattr(ceilings, "_median_ms", lambda *_: next(left))
        return left

    return use


def test_quick_ceilings_of_a_cpu_are_positive() -> None:
    found = json.loads(json.dumps(measure_ceilings(CPU, quick=True)))
    assert set(found["matmul_tflops"]) == {"fp32", "bf16"}
    for row in found["matmul_tflops"].values():
        assert row["tflops"] > 0
        assert (row["shape"], row["reason"]) == ([256, 256, 256], None)
    assert found["copy_gb_per_s"]["gb_per_s"] > 0


def test_rates_count_two_operations_per_multiply_add_and_both_directions_of_a_copy(
    times_ms: Times,
) -> None:
    times_ms(2.0, 4.0)
    row = matmul_ceiling("fp32", (128,), CPU, PLAN)
    assert row["tflops"] * 1e12 == pytest.approx(2 * 128**3 / 2e-3)
    row = copy_ceiling(CPU, PLAN)
    assert row["bytes"] == 2 * 2**20
    assert row["gb_per_s"] * 1e9 == pytest.approx(2 * 2**20 / 4e-3)


@pytest.mark.parametrize(
    ("milliseconds", "best", "unused"),
    [((1.0, 2.0, 40.0), 16, []), ((400.0, 1.0), 8, [1.0])],
    ids=["the fastest shape wins", "a shape that would take too long is not started"],
)
def test_the_best_of_some_shapes(
    milliseconds: tuple[float, ...], best: int, unused: list[float], times_ms: Times
) -> None:
    left = times_ms(*milliseconds)  # each shape is eight times the work of the one before
    assert matmul_ceiling("bf16", (8, 16, 32), CPU, PLAN)["shape"] == [best] * 3
    assert list(left) == unused


def test_what_cannot_be_measured_has_a_one_line_reason(
    times_ms: Times, monkeypatch: pytest.MonkeyPatch
) -> None:
    unsupported = matmul_ceiling("tf32", (128,), CPU, PLAN)
    assert unsupported["tflops"] is None
    assert unsupported["reason"].startswith("tf32 exists on NVIDIA GPUs")
    too_large = Plan(matmul_sides={}, copy_bytes=2**52, time_cap_s=1.0, min_time_s=0.01)
    nothing = {"gb_per_s": None, "bytes": None, "median_ms": None}
    assert copy_ceiling(CPU, too_large) == {**nothing, "reason": "out of memory"}
    times_ms(1.0)
    assert matmul_ceiling("fp32", (64, 2**25), CPU, PLAN)["shape"] == [64, 64, 64]

    def missing(*_: object) -> float:
        raise RuntimeError('"addmm_impl_cpu_" not implemented for this type\nat line 7')

    monkeypatch.setattr(ceilings, "_median_ms", missing)
    row = matmul_ceiling("bf16", (64,), CPU, PLAN)
    assert row["reason"] == '"addmm_impl_cpu_" not implemented for this type'


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_a_gpus_tensor_cores_are_faster_than_its_fp32_units() -> None:
    rates = {
        name: matmul_ceiling(name, (4096,), torch.device("cuda", 0), ceilings.GPU_PLAN)["tflops"]
        for name in ("fp32", "tf32", "bf16")
    }
    assert rates["fp32"] < rates["tf32"] < rates["bf16"]
