"""fp32 means fp32: TF32 is on only if asked for, and every switch is restored."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lmlab.measure.precision import (
    PRECISIONS,
    PrecisionError,
    precision_named,
    tf32_allowed,
    why_unsupported,
)

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
BACKENDS: Any = torch.backends


def switches() -> list[str]:
    return [
        torch.get_float32_matmul_precision(),
        BACKENDS.cuda.matmul.fp32_precision,
        BACKENDS.mkldnn.matmul.fp32_precision,
        BACKENDS.cudnn.conv.fp32_precision,
        BACKENDS.cudnn.rnn.fp32_precision,
    ]


@pytest.mark.parametrize("name", PRECISIONS)
def test_tf32_is_on_only_for_tf32(name: str) -> None:
    with tf32_allowed(name != "tf32"), tf32_allowed(PRECISIONS[name].tf32):
        assert torch.backends.cuda.matmul.allow_tf32 is (name == "tf32")
        assert torch.backends.cudnn.allow_tf32 is (name == "tf32")


@pytest.mark.parametrize("allowed", [True, False])
@pytest.mark.parametrize("through_newer_interface", [True, False])
def test_every_switch_is_restored_even_after_an_error(
    allowed: bool, through_newer_interface: bool
) -> None:
    untouched = BACKENDS.cudnn.conv.fp32_precision
    if through_newer_interface:
        BACKENDS.cudnn.conv.fp32_precision = "ieee"
    try:
        before = switches()
        with pytest.raises(RuntimeError, match="inside"), tf32_allowed(allowed):
            raise RuntimeError("inside")
        assert switches() == before
    finally:
        BACKENDS.cudnn.conv.fp32_precision = untouched


def test_an_unknown_precision_is_refused_in_one_line() -> None:
    line = r"^precision = 'fp64'; allowed: fp32, tf32, bf16, fp16$"
    with pytest.raises(PrecisionError, match=line):
        precision_named("fp64")


@pytest.mark.parametrize(
    ("capability", "unsupported"), [(None, {"tf32"}), ((7, 5), {"tf32", "bf16"}), ((9, 0), set())]
)
def test_support_depends_on_the_device(
    capability: tuple[int, int] | None, unsupported: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    device = CPU if capability is None else GPU
    assert {name for name in PRECISIONS if why_unsupported(name, device)} == unsupported


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_fp32_on_a_gpu_is_many_times_more_accurate_than_tf32() -> None:
    a, b = (torch.randn(1024, 1024, device="cuda") for _ in range(2))
    exact = a.double() @ b.double()
    error = {}
    for name in ("fp32", "tf32"):
        with tf32_allowed(PRECISIONS[name].tf32):
            error[name] = float((a @ b - exact).abs().max())
    assert error["fp32"] * 30 < error["tf32"]
