"""Kernels run on a CPU whether or not TRITON_INTERPRET is set, and leave Triton unchanged."""

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
import torch
from lmlab.attention import flash_attention, naive
q, k, v = (torch.randn(1, 1, 20, 16, generator=torch.Generator().manual_seed(0)) for _ in range(3))
torch.testing.assert_close(
    flash_attention(q, k, v, is_causal=True), naive.attention(q, k, v, is_causal=True)
)
"""


def test_kernels_run_in_a_process_that_triton_interprets_as_a_whole() -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1"}

    finished = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, check=False)

    assert finished.returncode == 0


def test_triton_is_left_unchanged() -> None:
    modules = (tl, tl.core, tl.math, tl.tensor, tl.dtype, tl.standard)
    before = [dict(vars(module)) for module in modules]
    x = torch.randn(1, 1, 8, 16)

    flash_attention(x, x, x, is_causal=True)

    for module, names in zip(modules, before, strict=True):
        after = dict(vars(module))
        assert {name for name in names if names[name] is not after.get(name)} == set()


def test_the_device_selects_the_kernel() -> None:
    kernel = flash_forward_kernel
    assert kernel_for(kernel, torch.device("cuda")) is kernel
    assert kernel_for(kernel, torch.device("cpu")) is interpreted(kernel)
