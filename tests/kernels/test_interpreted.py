"""Kernels run on a CPU whether or not TRITON_INTERPRET is set, and Triton is left as it was."""

import os
import subprocess
import sys

import pytest
import torch
import triton.language as tl

from lmlab.attention import flash_attention
from lmlab.kernels.flash_forward import flash_forward_kernel
from lmlab.kernels.interpreted import interpreted, kernel_for

pytestmark = pytest.mark.slow

PROGRAM = """
import torch, triton
from lmlab.attention import flash_attention, naive
q, k, v = (torch.randn(1, 1, 20, 16, generator=torch.Generator().manual_seed(0)) for _ in range(3))
torch.testing.assert_close(
    flash_attention(q, k, v, is_causal=True), naive.attention(q, k, v, is_causal=True)
)
"""


@pytest.mark.parametrize("variable", [None, "1"], ids=["not set", "set"])
def test_the_variable_makes_no_difference(variable: str | None) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    if variable:
        environment["TRITON_INTERPRET"] = variable

    finished = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, check=False)

    assert finished.returncode == 0


def test_triton_is_left_as_it_was() -> None:
    places = (tl, tl.core, tl.math, tl.tensor, tl.dtype, tl.standard)
    before = [dict(vars(place)) for place in places]
    x = torch.randn(1, 1, 8, 16)

    flash_attention(x, x, x, is_causal=True)

    for place, names in zip(places, before, strict=True):
        after = dict(vars(place))
        changed = {name for name in names if names[name] is not after.get(name)}
        assert not changed, f"{place} has changed: {sorted(changed)}"


def test_the_device_decides() -> None:
    assert kernel_for(flash_forward_kernel, torch.device("cuda")) is flash_forward_kernel
    assert kernel_for(flash_forward_kernel, torch.device("cpu")) is interpreted(
        flash_forward_kernel
    )
