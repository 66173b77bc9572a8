"""`from lmlab.attention import ...` finds the public names, and imports nothing before."""

import subprocess
import sys

import pytest

import lmlab.attention


def test_public_names_lead_home() -> None:
    from lmlab.attention import FlashAttention, FlashAttentionTiled, flash_attention
    from lmlab.attention import flash as flash_module
    from lmlab.attention import tiled as tiled_module

    assert FlashAttention is flash_module.FlashAttention
    assert FlashAttentionTiled is tiled_module.FlashAttentionTiled
    assert flash_attention is flash_module.flash_attention


@pytest.mark.parametrize(
    ("asked", "not_imported"),
    [
        ("import lmlab.attention", ["torch", "triton"]),
        ("from lmlab.attention import FlashAttentionTiled", ["triton", "lmlab.attention.flash"]),
    ],
)
def test_a_name_costs_its_own_imports_only(asked: str, not_imported: list[str]) -> None:
    code = f"import sys; {asked}; sys.exit(any(name in sys.modules for name in {not_imported}))"

    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'flush'"):
        lmlab.attention.flush  # noqa: B018
