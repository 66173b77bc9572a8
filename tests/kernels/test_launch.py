"""Every way to launch the portable kernels gives the same numbers; too-large tiles are dropped."""

import os
import subprocess
import sys
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import triton.language as tl
from triton.runtime.errors import OutOfResources

from lmlab.attention import flash_attention
from lmlab.kernels import launch
from lmlab.kernels.configs import Tiles
from tests.attention.reference import Shape, exact
from tests.kernels.conftest import run

pytestmark = pytest.mark.slow

BASE = {"block_m": 32, "block_n": 32, "warps": 4, "stages": 2}
WHOLE = Shape(keys=64, head_dim=16)
RAGGED = Shape(keys=75, queries=50, head_dim=16, heads=2)
GROUPED = Shape(keys=37, queries=21, head_dim=12, batch=2, heads=4, group=2)


@pytest.mark.parametrize(
    ("shape", "is_causal", "options"),
    [
        *((shape, is_causal, {}) for shape in (WHOLE, RAGGED) for is_causal in (True, False)),
        (RAGGED, True, {"paired": False}),
        *((RAGGED, is_causal, {"splits": 3, "paired": False}) for is_causal in (True, False)),
        (WHOLE, True, {"splits": 5, "paired": False}),  # of which some are empty
        (RAGGED, True, {"tma": True}),
        (RAGGED, True, {"fp32_dot": "bf16x6", "tma": True}),
        *((RAGGED, True, {side: 16}) for side in ("block_m", "block_n")),
        (GROUPED, True, {"splits": 3}),
        (GROUPED, False, {"inline_delta": True}),
        (GROUPED, True, {"fp32_dot": "bf16x6"}),
    ],
    ids=str,
)
def test_every_launch_option(shape: Shape, is_causal: bool, options: dict[str, Any]) -> None:
    inputs = shape.inputs()
    tiles = Tiles(**BASE | options)
    o, _, *grads = run(inputs, is_causal, tiles, tiles)
    expected = list(exact(inputs, is_causal))
    torch.testing.assert_close([o, *grads], expected, rtol=1e-4, atol=1e-5, check_dtype=False)


def test_options_that_must_not_change_a_bit() -> None:
    unaligned = Shape(keys=20, head_dim=17).inputs(torch.float16)  # rows of 34 bytes: no TMA
    plain, tma = (run(unaligned, True, Tiles(**BASE, tma=tma)) for tma in (False, True))
    assert torch.equal(plain[0], tma[0])
    inputs, splits = Shape(keys=75, head_dim=16).inputs(), Tiles(**BASE, paired=False, splits=2)
    expected = run(inputs, True, splits, splits)
    torch.set_default_dtype(torch.float16)
    try:
        assert all(map(torch.equal, run(inputs, True, splits, splits), expected))
    finally:
        torch.set_default_dtype(torch.float32)


def attempts(monkeypatch: pytest.MonkeyPatch, fits: Any) -> list[Tiles]:
    """Tiles with which calls are planned, of which only those that fit can run."""
    tried: list[Tiles] = []
    plan = launch.build_forward
    never_fits = Mock(side_effect=OutOfResources(300_000, 232_448, "shared memory"))

    def planned(*arguments: Any) -> Any:
        tried.append(arguments[-1])
        return plan(*arguments) if fits(tried[-1]) else never_fits

    monkeypatch.setattr(launch, "build_forward", planned)
    launch.forget_calls()
    return tried


def test_tiles_that_do_not_fit_are_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = attempts(monkeypatch, lambda tiles: tiles.block_m <= 32)
    q, k, v, _ = WHOLE.inputs()
    for _ in range(2):
        launch.forward(q, k, v, is_causal=True, scale=0.25)
    assert len(tried) == len(set(tried)) > 1
    assert [tiles.block_m <= 32 for tiles in tried] == [False] * (len(tried) - 1) + [True]


def test_requested_tiles_that_are_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    attempts(monkeypatch, lambda tiles: False)
    q, k, v, _ = WHOLE.inputs()
    message = r"\A[^\n]*32 x 32, 4 warps, 2 stages[^\n]*300000[^\n]*\Z"
    with pytest.raises(launch.TilesTooLarge, match=message):
        launch.forward(q, k, v, is_causal=True, scale=0.25, tiles=Tiles(**BASE))
    with pytest.raises(OutOfResources):
        launch.forward(q, k, v, is_causal=True, scale=0.25)


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
