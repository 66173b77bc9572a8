"""Every way to launch the portable kernels gives the same numbers; too-large tiles are dropped."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources

from lmlab.kernels import launch
from lmlab.kernels.configs import Tiles
from tests.attention.reference import Shape, attend, output_and_gradients

pytestmark = pytest.mark.slow

BASE = {"block_m": 32, "block_n": 32, "warps": 4, "stages": 2}
WHOLE = Shape(keys=64, head_dim=16)
RAGGED = Shape(keys=75, queries=50, head_dim=16, heads=2)
GROUPED = Shape(keys=37, queries=21, head_dim=12, batch=2, heads=4, group=2)


def run(inputs: tuple[Tensor, ...], is_causal: bool, tiles: Tiles) -> tuple[Tensor, ...]:
    """Output and gradients."""
    q, k, v, grad_o = inputs
    scale = q.shape[-1] ** -0.5
    o, lse = launch.forward(q, k, v, is_causal=is_causal, scale=scale, tiles=tiles)
    grads = launch.backward(grad_o, q, k, v, o, lse, is_causal=is_causal, scale=scale, tiles=tiles)
    return o, *grads


@pytest.mark.parametrize(
    ("shape", "is_causal", "tiles"),
    [
        pytest.param(WHOLE, True, Tiles(**BASE), id="paired"),
        pytest.param(WHOLE, False, Tiles(**BASE), id="paired, full"),
        pytest.param(RAGGED, True, Tiles(**BASE), id="ragged"),
        pytest.param(RAGGED, False, Tiles(**BASE), id="ragged, full"),
        pytest.param(RAGGED, True, Tiles(**BASE, paired=False), id="unpaired"),
        pytest.param(RAGGED, True, Tiles(**BASE, splits=3, paired=False), id="splits"),
        pytest.param(RAGGED, False, Tiles(**BASE, splits=3, paired=False), id="splits, full"),
        pytest.param(WHOLE, True, Tiles(**BASE, splits=5, paired=False), id="empty splits"),
        pytest.param(RAGGED, True, Tiles(**BASE, tma=True), id="tma"),
        pytest.param(RAGGED, True, Tiles(**BASE, fp32_dot="bf16x6", tma=True), id="terms, tma"),
        pytest.param(RAGGED, True, Tiles(**BASE | {"block_m": 16}), id="16 x 32"),
        pytest.param(RAGGED, True, Tiles(**BASE | {"block_n": 16}), id="32 x 16"),
        pytest.param(GROUPED, True, Tiles(**BASE, splits=3), id="grouped, splits"),
        pytest.param(GROUPED, False, Tiles(**BASE, inline_delta=True), id="grouped, inline delta"),
        pytest.param(GROUPED, True, Tiles(**BASE, fp32_dot="bf16x6"), id="grouped, terms"),
    ],
)
def test_every_launch_option_gives_the_same_numbers(
    shape: Shape, is_causal: bool, tiles: Tiles
) -> None:
    inputs = shape.inputs()

    found = run(inputs, is_causal, tiles)

    wide = tuple(x.double() for x in inputs)
    expected = output_and_gradients(lambda q, k, v: attend(q, k, v, is_causal)[0], *wide)
    for ours, right in zip(found, expected, strict=True):
        torch.testing.assert_close(ours.double(), right, rtol=1e-4, atol=1e-5)


def test_tma_is_not_used_where_strides_do_not_allow_it() -> None:
    inputs = Shape(keys=20, head_dim=17).inputs(torch.float16)  # rows of 34 bytes

    o, *_ = run(inputs, True, Tiles(**BASE, tma=True))

    assert torch.equal(o, run(inputs, True, Tiles(**BASE))[0])


def test_splits_are_deterministic_and_fp32_whatever_the_default_dtype() -> None:
    inputs = Shape(keys=75, head_dim=16).inputs()
    split = partial(run, inputs, True, Tiles(**BASE, paired=False, splits=2))
    expected = split()

    torch.set_default_dtype(torch.float16)
    try:
        found = split()
    finally:
        torch.set_default_dtype(torch.float32)

    assert all(map(torch.equal, found, expected))


def never_fits(*_: object) -> None:
    raise OutOfResources(300_000, 232_448, "shared memory")


def attempts(monkeypatch: pytest.MonkeyPatch, fits: Any) -> list[Tiles]:
    """Tiles with which calls are planned, of which only those that fit can run."""
    tried: list[Tiles] = []
    plan = launch.plan_forward

    def planned(*arguments: Any) -> Any:
        tried.append(arguments[-1])
        return plan(*arguments) if fits(tried[-1]) else never_fits

    monkeypatch.setattr(launch, "plan_forward", planned)
    launch.forget_calls()
    return tried


def test_tiles_that_do_not_fit_are_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = attempts(monkeypatch, lambda tiles: tiles.block_m <= 32)
    q, k, v, _ = WHOLE.inputs()

    for _ in range(2):
        launch.forward(q, k, v, is_causal=True, scale=0.25)

    assert len(tried) == len(set(tried)) > 1
    assert [tiles.block_m <= 32 for tiles in tried] == [False] * (len(tried) - 1) + [True]


def test_requested_tiles_that_are_too_large_are_a_one_line_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    attempts(monkeypatch, lambda tiles: False)
    q, k, v, _ = WHOLE.inputs()

    with pytest.raises(launch.TilesTooLarge, match=r"32 x 32, 4 warps, 2 stages.*300000") as caught:
        launch.forward(q, k, v, is_causal=True, scale=0.25, tiles=Tiles(**BASE))
    assert "\n" not in str(caught.value)
    with pytest.raises(OutOfResources):
        launch.forward(q, k, v, is_causal=True, scale=0.25)
