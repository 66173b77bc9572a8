"""Why a variant is not measured here is None or one line."""

import shutil
import warnings
from functools import partial
from typing import Any

import pytest
import torch

from lmlab.attention import compiled, flash, flex, registry, sdpa
from lmlab.attention.support import why_unsupported

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
on_cpu = partial(why_unsupported, device=CPU, dtype=torch.float32, head_dim=64)


def test_what_is_measured_on_a_cpu() -> None:
    reasons = {name: on_cpu(name) for name in registry.VARIANTS if name != "compiled"}

    unsupported = {name for name, reason in reasons.items() if reason is not None}
    assert unsupported == {
        "sdpa_cudnn",
        "sdpa_efficient",
        "flex",
        "flash",
        "flash_compiled_backward",
    }
    assert all("\n" not in str(reason) for reason in reasons.values())


def test_users_own_variants() -> None:
    assert on_cpu("math:sqrt") is None
    assert on_cpu("no_such_module_x:f") == (
        "no_such_module_x:f cannot be imported: No module named 'no_such_module_x'"
    )


def test_compiling_on_a_cpu_needs_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    reason = partial(compiled.why_unsupported, "attention", dtype=torch.float32, head_dim=64)

    monkeypatch.setattr(shutil, "which", lambda name: "/usr/bin/c++" if name == "c++" else None)
    assert reason(device=CPU) is None

    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert "found none of c++, g++, clang++" in str(reason(device=CPU))
    assert reason(device=GPU) is None


@pytest.mark.parametrize(
    ("capability", "dtype", "head_dim", "expected"),
    [
        pytest.param((9, 0), torch.bfloat16, 64, None, id="H200"),
        pytest.param((7, 5), torch.float16, 64, "8.0 or newer, this GPU has 7.5", id="T4"),
        pytest.param((9, 0), torch.float64, 64, "dtype is torch.float64", id="float64"),
        pytest.param((9, 0), torch.bfloat16, 512, "head_dim is 512", id="head_dim 512"),
    ],
)
def test_what_flash_needs_of_a_gpu(
    capability: tuple[int, int],
    dtype: torch.dtype,
    head_dim: int,
    expected: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)

    reason = flash.why_unsupported("attention", device=GPU, dtype=dtype, head_dim=head_dim)

    assert reason is None if expected is None else expected in str(reason)


@pytest.mark.parametrize(("head_dim", "supported"), [(16, True), (8, False)])
def test_flex_needs_sixteen_features(head_dim: int, supported: bool) -> None:
    reason = flex.why_unsupported("attention", device=GPU, dtype=torch.float16, head_dim=head_dim)

    assert (reason is None) == supported


@pytest.mark.parametrize(
    ("warning", "expected"),
    [("fp32 is not taken (Triggered internally at x.h:1)", "fp32 is not taken"), (None, "rejects")],
)
def test_the_reason_of_a_backend_is_quoted(
    warning: str | None, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rejects(params: Any, debug: bool) -> bool:
        if warning:
            warnings.warn(warning, stacklevel=1)
        return False

    monkeypatch.setattr(sdpa, "SDPAParams", lambda *arguments: None)
    monkeypatch.setattr(torch, "empty", lambda *size, **options: None)
    monkeypatch.setitem(sdpa._CAN_USE, sdpa._BACKENDS["flash"], rejects)

    reason = sdpa.why_unsupported("flash", device=GPU, dtype=torch.float32, head_dim=64)

    assert expected in str(reason)
    assert "Triggered" not in str(reason)
