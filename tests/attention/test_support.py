"""Why a variant is not measured here is None or one line."""

import shutil
import warnings
from functools import partial
from typing import Any

import pytest
import torch

from lmlab.attention import compiled, flash, flash_attn_4, flex, registry, sdpa
from lmlab.attention.support import why_unsupported

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
on_cpu = partial(why_unsupported, device=CPU, dtype=torch.float32, head_dim=64)


def test_what_is_measured_on_a_cpu() -> None:
    reasons = {name: on_cpu(name) for name in registry.VARIANTS if name != "compiled"}

    unsupported = {name for name, reason in reasons.items() if reason is not None}
    kernels = {"flash", "flash_attn_4", "flash_compiled_backward", "flex"}
    assert unsupported == {"sdpa_cudnn", "sdpa_efficient", *kernels}
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


@pytest.mark.parametrize(
    ("installed", "capability", "dtype", "head_dim", "expected"),
    [
        (True, (9, 0), torch.bfloat16, 128, None),
        (False, (9, 0), torch.bfloat16, 128, "flash-attn-4 is not installed"),
        (True, (8, 0), torch.bfloat16, 128, "needs a Hopper or Blackwell GPU"),
        (True, (9, 0), torch.float32, 128, "got torch.float32"),
        (True, (9, 0), torch.bfloat16, 256, "got 256"),
    ],
)
def test_what_flash_attn_4_needs(
    installed: bool,
    capability: tuple[int, int],
    dtype: torch.dtype,
    head_dim: int,
    expected: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(flash_attn_4, "find_spec", lambda name: name if installed else None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)

    reason = flash_attn_4.why_unsupported("attention", device=GPU, dtype=dtype, head_dim=head_dim)

    assert reason is None if expected is None else expected in str(reason)


@pytest.mark.parametrize("returned", ["output", "output and lse"])
def test_flash_attn_4_gets_sequence_before_heads(
    returned: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def attend(q: Any, k: Any, v: Any, *, causal: bool) -> Any:
        assert q.shape == (2, 5, 3, 16)
        assert causal
        return v if returned == "output" else (v, None)

    monkeypatch.setattr(flash_attn_4, "_function", lambda: attend)
    q, k, v = torch.randn(3, 2, 3, 5, 16)

    assert torch.equal(flash_attn_4.attention(q, k, v, is_causal=True), v)


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
