"""What a machine lacks is a reason of one line."""

import shutil
import warnings
from functools import partial
from typing import Any

import pytest
import torch

from lmlab.attention import compiled, flash, flex, registry, sdpa
from lmlab.attention.support import why_unsupported

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("naive", None),
        ("tiled", None),
        ("sdpa_math", None),
        ("sdpa_flash", None),
        ("sdpa_cudnn", "PyTorch has its cudnn attention for CUDA GPUs only, not for cpu"),
        ("sdpa_efficient", "PyTorch has its efficient attention for CUDA GPUs only, not for cpu"),
        ("flex", "FlexAttention is fused on CUDA GPUs only, on cpu it is plain operations"),
        ("flash", "on a CPU flash runs in Triton's interpreter, right, but its time means nothing"),
    ],
)
def test_what_is_measured_on_a_cpu(name: str, reason: str | None) -> None:
    assert why_unsupported(name, device=CPU, dtype=torch.float32, head_dim=64) == reason


def test_every_variant_has_an_answer() -> None:
    for name in registry.VARIANTS:
        answer = why_unsupported(name, device=CPU, dtype=torch.float32, head_dim=64)
        assert answer is None or "\n" not in answer


def test_compiling_on_a_cpu_needs_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    judge = partial(compiled.why_unsupported, "attention", dtype=torch.float32, head_dim=64)

    monkeypatch.setattr(shutil, "which", lambda name: "/usr/bin/c++" if name == "c++" else None)
    assert judge(device=CPU) is None

    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert judge(device=CPU) == (
        "torch.compile needs a C++ compiler on a CPU, found none of c++, g++, clang++"
    )
    assert judge(device=GPU) is None


@pytest.mark.parametrize(
    ("capability", "dtype", "head_dim", "reason"),
    [
        pytest.param((9, 0), torch.bfloat16, 64, None, id="an H200"),
        pytest.param((7, 5), torch.float16, 64, "8.0 or newer, this GPU has 7.5", id="a T4"),
        pytest.param((9, 0), torch.float64, 64, "torch.float64 is not one of", id="float64"),
        pytest.param((9, 0), torch.bfloat16, 512, "head_dim is 512", id="head_dim 512"),
    ],
)
def test_what_flash_needs_of_a_gpu(
    capability: tuple[int, int],
    dtype: torch.dtype,
    head_dim: int,
    reason: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)

    answer = flash.why_unsupported("attention", device=GPU, dtype=dtype, head_dim=head_dim)

    assert answer is None if reason is None else reason in str(answer)


def test_flex_needs_sixteen_features() -> None:
    answer = partial(flex.why_unsupported, "attention", device=GPU, dtype=torch.bfloat16)

    assert answer(head_dim=16) is None
    assert answer(head_dim=8) == "FlexAttention needs head_dim 16 or more, got 8"


@pytest.mark.parametrize("said", ["fp32 is not taken (Triggered internally at x.h:1)", None])
def test_a_backend_that_declines_is_quoted(
    said: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def declines(params: Any, debug: bool) -> bool:
        if said:
            warnings.warn(said, stacklevel=1)
        return False

    monkeypatch.setattr(sdpa, "SDPAParams", lambda *arguments: None)
    monkeypatch.setattr(torch, "empty", lambda *size, **options: None)
    monkeypatch.setitem(sdpa._CAN_USE, sdpa._BACKENDS["flash"], declines)

    answer = sdpa.why_unsupported("flash", device=GPU, dtype=torch.float32, head_dim=64)

    assert answer == (
        "fp32 is not taken" if said else "PyTorch's flash attention declines such inputs"
    )


def test_a_users_own_variant_runs_everywhere() -> None:
    answer = why_unsupported("math:sqrt", device=CPU, dtype=torch.float32, head_dim=64)

    assert answer is None


def test_a_variant_whose_import_fails_is_unsupported_and_not_a_crash() -> None:
    answer = why_unsupported("no_such_module_x:f", device=CPU, dtype=torch.float32, head_dim=64)

    assert answer == "no_such_module_x:f cannot be imported: No module named 'no_such_module_x'"
