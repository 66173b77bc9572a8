"""A precision's name is true while it is in force, and leaves no trace."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lmlab.measure.precision import PRECISIONS, PrecisionError, precision_context, tf32_allowed

CPU = torch.device("cpu")


def switches() -> dict[str, Any]:
    backends: Any = torch.backends
    return {
        "word": torch.get_float32_matmul_precision(),
        "matmul": backends.cuda.matmul.fp32_precision,
        "mkldnn": backends.mkldnn.matmul.fp32_precision,
        "conv": backends.cudnn.conv.fp32_precision,
        "rnn": backends.cudnn.rnn.fp32_precision,
    }


@pytest.mark.parametrize("name", ["fp32", "bf16", "fp16"])
def test_tf32_is_off_unless_the_precision_says_tf32(name: str) -> None:
    with tf32_allowed(True), precision_context(name, CPU):
        assert not torch.backends.cuda.matmul.allow_tf32
        assert not torch.backends.cudnn.allow_tf32


def test_tf32_is_on_for_tf32() -> None:
    with tf32_allowed(PRECISIONS["tf32"].tf32):
        assert torch.backends.cuda.matmul.allow_tf32
        assert torch.backends.cudnn.allow_tf32


@pytest.mark.parametrize("allowed", [True, False], ids=["allowed", "forbidden"])
def test_every_switch_is_restored_also_after_an_error(allowed: bool) -> None:
    before = switches()
    with pytest.raises(RuntimeError, match="inside"), tf32_allowed(allowed):
        raise RuntimeError("inside")
    assert switches() == before


def test_a_switch_set_by_the_newer_interface_is_restored_too() -> None:
    backends: Any = torch.backends
    untouched = backends.cudnn.conv.fp32_precision
    backends.cudnn.conv.fp32_precision = "ieee"
    try:
        before = switches()
        with tf32_allowed(True):
            assert torch.backends.cudnn.allow_tf32
        assert switches() == before
    finally:
        backends.cudnn.conv.fp32_precision = untouched


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)],
)
def test_a_linear_layer_computes_in_the_named_type(name: str, dtype: torch.dtype) -> None:
    layer = torch.nn.Linear(8, 8)
    with precision_context(name, CPU):
        assert layer(torch.randn(2, 8)).dtype is dtype
    assert layer(torch.randn(2, 8)).dtype is torch.float32
    assert layer.weight.dtype is torch.float32


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("fp64", r"^precision: got 'fp64', allowed are fp32, tf32, bf16, fp16$"),
        ("tf32", r"^precision: tf32 exists on NVIDIA GPUs .* not on a CPU$"),
    ],
    ids=["unknown", "not-on-a-cpu"],
)
def test_a_precision_that_is_not_there_is_refused_in_one_line(name: str, line: str) -> None:
    with pytest.raises(PrecisionError, match=line), precision_context(name, CPU):
        pass


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_fp32_on_a_gpu_is_many_times_closer_than_tf32() -> None:
    a, b = (torch.randn(1024, 1024, device="cuda") for _ in range(2))
    exact = a.double() @ b.double()
    error = {}
    for name in ("fp32", "tf32"):
        with precision_context(name, torch.device("cuda", 0)):
            error[name] = float((a @ b - exact).abs().max())
    assert error["fp32"] * 30 < error["tf32"]
