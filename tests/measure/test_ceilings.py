"""Measured ceilings: positive numbers, or a reason in their place."""

from __future__ import annotations

import json
import time

import pytest
import torch

from lmlab.measure import ceilings
from lmlab.measure.ceilings import Plan, copy_ceiling, matmul_ceiling, measure_ceilings

CPU = torch.device("cpu")
SMALL = Plan(matmul_sides={}, copy_bytes=2**20, time_cap_s=0.05, min_time_s=0.01)


def test_quick_ceilings_of_a_cpu_are_positive_and_quick() -> None:
    started = time.monotonic()
    found = json.loads(json.dumps(measure_ceilings(CPU, quick=True)))
    assert time.monotonic() - started < 3  # a second, and room for a crowded machine
    assert set(found["matmul_tflops"]) == {"fp32", "bf16"}
    for row in found["matmul_tflops"].values():
        assert row["tflops"] > 0
        assert row["shape"] == [256, 256, 256]
        assert row["reason"] is None
    assert found["copy_gb_per_s"]["gb_per_s"] > 0


def test_a_rate_is_operations_over_the_median_time() -> None:
    row = matmul_ceiling("fp32", (128,), CPU, SMALL)
    assert row["tflops"] * 1e12 == pytest.approx(2 * 128**3 / (row["median_ms"] * 1e-3))


def test_a_copy_counts_bytes_read_and_bytes_written() -> None:
    row = copy_ceiling(CPU, SMALL)
    assert row["bytes"] == 2 * 2**20
    assert row["gb_per_s"] * 1e9 == pytest.approx(2 * 2**20 / (row["median_ms"] * 1e-3))


def test_the_fastest_shape_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    milliseconds = iter([1.0, 2.0, 40.0])  # 8 times the work each: 2, 8 and 3.2 relative rates
    monkeypatch.setattr(ceilings, "_median_ms", lambda *_: next(milliseconds))
    plan = Plan(matmul_sides={}, copy_bytes=0, time_cap_s=10, min_time_s=0.1)
    assert matmul_ceiling("fp32", (8, 16, 32), CPU, plan)["shape"] == [16, 16, 16]


def test_a_shape_that_clearly_takes_too_long_is_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    def slow(*_: object) -> float:
        tried.append("shape")
        return 400.0

    monkeypatch.setattr(ceilings, "_median_ms", slow)
    plan = Plan(matmul_sides={}, copy_bytes=0, time_cap_s=1.0, min_time_s=0.1)
    assert matmul_ceiling("bf16", (8, 16, 32), CPU, plan)["shape"] == [8, 8, 8]
    assert len(tried) == 1


def test_a_precision_that_the_device_lacks_is_a_reason() -> None:
    row = matmul_ceiling("tf32", (128,), CPU, SMALL)
    assert row["tflops"] is None
    assert row["reason"].startswith("tf32 exists on NVIDIA GPUs")


def test_memory_that_is_not_there_is_a_reason() -> None:
    plan = Plan(matmul_sides={}, copy_bytes=2**52, time_cap_s=0.05, min_time_s=0.01)
    assert copy_ceiling(CPU, plan) == {
        "gb_per_s": None,
        "bytes": None,
        "median_ms": None,
        "reason": "out of memory",
    }


def test_running_out_of_memory_at_a_large_shape_keeps_the_smaller_one() -> None:
    row = matmul_ceiling("fp32", (64, 2**25), CPU, SMALL)
    assert row["shape"] == [64, 64, 64]


def test_an_operation_that_does_not_exist_is_a_reason_in_one_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def missing(*_: object) -> float:
        raise RuntimeError('"addmm_impl_cpu_" not implemented for this type\nat line 7')

    monkeypatch.setattr(ceilings, "_median_ms", missing)
    row = matmul_ceiling("bf16", (64,), CPU, SMALL)
    assert row["reason"] == '"addmm_impl_cpu_" not implemented for this type'


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_a_gpus_tensor_cores_outrun_its_plain_ones() -> None:
    rates = {
        name: matmul_ceiling(name, (4096,), torch.device("cuda", 0), ceilings.GPU_PLAN)["tflops"]
        for name in ("fp32", "tf32", "bf16")
    }
    assert rates["fp32"] < rates["tf32"] < rates["bf16"]
