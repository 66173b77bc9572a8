"""Attention variants are found by name, and why one is not measured here is None or one line."""

import shutil
import subprocess
import sys
import warnings
from functools import partial
from typing import Any

import pytest
import torch

import lmlab.attention
import lmlab.parallel
from lmlab import import_path
from lmlab.attention import compiled, flash, flash_attn_4, flex, registry, sdpa
from lmlab.attention.support import why_unsupported


@pytest.mark.parametrize("name", sorted(registry.VARIANTS))
def test_every_registered_name_leads_to_a_function_of_its_module(name: str) -> None:
    module, _ = import_path.split(registry.path_of(name))
    assert registry.load(name).__module__ == module  # type: ignore[attr-defined]


@pytest.mark.slow
def test_tiled_attention_needs_no_triton() -> None:
    code = "import lmlab.attention, sys; lmlab.attention.FlashAttentionTiled"
    command = [sys.executable, "-c", f"{code}; sys.exit('triton' in sys.modules)"]
    assert subprocess.run(command, check=False).returncode == 0


@pytest.mark.parametrize(
    ("package", "names"),
    [(lmlab.attention, lmlab.attention._MODULES), (lmlab.parallel, lmlab.parallel._MODULE_OF)],
)
def test_public_names(package: Any, names: dict[str, str]) -> None:
    assert [getattr(package, name).__name__ for name in names] == list(names)
    with pytest.raises(AttributeError, match="has no attribute 'flush'"):
        package.flush  # noqa: B018


@pytest.mark.parametrize(
    ("name", "message"),
    [
        pytest.param("flush", "attention: 'flush' is not known; allowed: .*naive", id="unknown"),
        pytest.param("no_such_module_x:f", "No module named 'no_such_module_x'", id="no module"),
        pytest.param("math:no_such", "math has no attribute 'no_such'", id="no attribute"),
        pytest.param("math:pi", "'math:pi' is not a function", id="not a function"),
        pytest.param("a:b:c", "is not an import path", id="two colons"),
        pytest.param(":f", "is not an import path", id="no module part"),
    ],
)
def test_a_wrong_name_is_a_one_line_error(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=rf"\A[^\n]*{message}[^\n]*\Z"):
        registry.load(name)


def test_no_two_variants_share_a_code_object() -> None:
    """torch.compile caches by code object: variants that share one recompile each other."""
    variants = [registry.load(name) for name in registry.VARIANTS if name.startswith("sdpa_")]
    assert len({variant.__code__ for variant in variants}) == len(variants)  # type: ignore[attr-defined]


CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
on_cpu = partial(why_unsupported, device=CPU, dtype=torch.float32, head_dim=64)


def test_what_is_measured_on_a_cpu() -> None:
    reasons = {name: on_cpu(name) for name in registry.VARIANTS if name != "compiled"}
    unsupported = {name for name, reason in reasons.items() if reason is not None}
    kernels = {"flash", "flash_attn_4", "flash_attn_4_deterministic", "flash_compiled_backward"}
    assert unsupported == {"sdpa_cudnn", "sdpa_efficient", "flex", *kernels}
    assert all("\n" not in str(reason) for reason in reasons.values())
    assert on_cpu("math:sqrt") is None, "a user's own"
    assert "No module named 'no_such_module_x'" in str(on_cpu("no_such_module_x:f"))


def test_compiling_on_a_cpu_needs_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    reason = partial(compiled.why_unsupported, "attention", dtype=torch.float32, head_dim=64)
    monkeypatch.setattr(shutil, "which", lambda name: "/usr/bin/c++" if name == "c++" else None)
    assert reason(device=CPU) is None
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert "found none of c++, g++, clang++" in str(reason(device=CPU))
    assert reason(device=GPU) is None


@pytest.mark.parametrize(
    ("variant", "capability", "dtype", "head_dim", "expected"),
    [
        (flash, (9, 0), torch.bfloat16, 64, None),
        (flash, (7, 5), torch.float16, 64, "8.0 or newer, this GPU has 7.5"),
        (flash, (9, 0), torch.float64, 64, "dtype is torch.float64"),
        (flash, (9, 0), torch.bfloat16, 512, "head_dim is 512"),
        (flex, (9, 0), torch.float16, 16, None),
        (flex, (9, 0), torch.float16, 8, "16"),
        (flash_attn_4, (9, 0), torch.bfloat16, 128, None),
        (flash_attn_4, (8, 0), torch.bfloat16, 128, "needs a Hopper or Blackwell GPU"),
        (flash_attn_4, (9, 0), torch.float32, 128, "got torch.float32"),
        (flash_attn_4, (9, 0), torch.bfloat16, 256, "got 256"),
        (flash_attn_4, None, torch.bfloat16, 128, "flash-attn-4 is not installed"),
    ],
)
def test_what_kernels_need_of_a_gpu(
    variant: Any, capability: tuple[int, int] | None, dtype: torch.dtype, head_dim: int, expected:
    str | None, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(flash_attn_4, "find_spec", lambda name: name if capability else None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    reason = variant.why_unsupported("attention", device=GPU, dtype=dtype, head_dim=head_dim)
    assert reason is None if expected is None else expected in str(reason)


@pytest.mark.parametrize("returned", ["output", "output and lse"])
def test_flash_attn_4_layout(returned: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def attend(q: Any, k: Any, v: Any, *, causal: bool) -> Any:
        assert q.shape == (2, 5, 3, 16)
        assert causal
        return v if returned == "output" else (v, None)

    monkeypatch.setattr(flash_attn_4, "_function", lambda: attend)
    q, k, v = torch.randn(3, 2, 3, 5, 16)
    assert torch.equal(flash_attn_4.attention(q, k, v, is_causal=True), v)


@pytest.mark.parametrize(
    ("warning", "expected"),
    [("fp32 is not taken (Triggered internally at x.h:1)", "fp32 is not taken"), (None, "rejects")],
)
def test_sdpa_reasons(warning: str | None, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def rejects(params: Any, debug: bool) -> bool:
        if warning:
            warnings.warn(warning, stacklevel=1)
        return False

    monkeypatch.setattr(sdpa, "SDPAParams", lambda *arguments: None)
    monkeypatch.setattr(torch, "empty", lambda *size, **options: None)
    monkeypatch.setitem(sdpa._CAN_USE, "flash", rejects)
    reason = sdpa.why_unsupported("flash", device=GPU, dtype=torch.float32, head_dim=64)
    assert expected in str(reason)
    assert "Triggered" not in str(reason)
