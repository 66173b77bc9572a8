"""Attention variants are found by name, and only the one asked for is imported."""

import subprocess
import sys
from pathlib import Path

import pytest

import lmlab.attention
from lmlab.attention import registry

SRC = Path(registry.__file__).parents[2]


@pytest.mark.parametrize("name", sorted(registry.VARIANTS))
def test_every_registered_name_leads_to_a_function_of_its_module(name: str) -> None:
    function = registry.load(name)

    assert function.__module__ == registry.module_of(name)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("code", "not_imported"),
    [
        (
            "from lmlab.attention import registry; registry.module_of('naive')",
            ["torch", "lmlab.attention.naive"],
        ),
        ("from lmlab.attention import FlashAttentionTiled", ["triton", "lmlab.attention.flash"]),
    ],
)
def test_a_name_costs_its_own_imports_only(code: str, not_imported: list[str]) -> None:
    code = f"import sys; {code}; sys.exit(any(name in sys.modules for name in {not_imported}))"

    finished = subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": str(SRC)})

    assert finished.returncode == 0


def test_public_names() -> None:
    for name in lmlab.attention.__all__:
        assert getattr(lmlab.attention, name).__name__ == name
    with pytest.raises(AttributeError, match="has no attribute 'flush'"):
        lmlab.attention.flush  # noqa: B018


def test_a_users_own_function_needs_no_entry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_attention.py").write_text("def mine(q, k, v, *, is_causal):\n    return v\n")
    monkeypatch.syspath_prepend(tmp_path)

    assert registry.module_of("own_attention:mine") == "own_attention"
    assert registry.load("own_attention:mine")("q", "k", "v", is_causal=True) == "v"  # type: ignore[arg-type, comparison-overlap]


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
    with pytest.raises(ValueError, match=message) as caught:
        registry.load(name)

    assert "\n" not in str(caught.value)


def test_no_two_variants_share_a_code_object() -> None:
    """torch.compile caches by code object: variants that share one recompile each other."""
    variants = [registry.load(name) for name in registry.VARIANTS if name.startswith("sdpa_")]
    assert len({variant.__code__ for variant in variants}) == len(variants)  # type: ignore[attr-defined]
