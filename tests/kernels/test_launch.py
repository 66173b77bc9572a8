"""Every way to launch the kernels gives the same numbers; what does not fit is not tried twice."""

from collections.abc import Iterator
from functools import partial

import pytest
import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources

from lmlab.kernels import launch
from lmlab.kernels.configs import Tiles
from lmlab.kernels.problem import Problem
from tests.attention.reference import Shape, attend, output_and_gradients

pytestmark = pytest.mark.slow

PLAIN = {"kept": 32, "walked": 16, "warps": 4, "stages": 2}


def pass_through(inputs: tuple[Tensor, ...], is_causal: bool, tiles: Tiles) -> tuple[Tensor, ...]:
    q, k, v, grad_o = inputs
    scale = q.shape[-1] ** -0.5
    o, lse = launch.forward(q, k, v, is_causal=is_causal, scale=scale, tiles=tiles)
    grads = launch.backward(grad_o, q, k, v, o, lse, is_causal=is_causal, scale=scale, tiles=tiles)
    return o, *grads


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(
    "tiles",
    [
        pytest.param(Tiles(**PLAIN), id="pairs"),
        pytest.param(Tiles(**PLAIN, paired=False), id="keys and queries apart"),
        pytest.param(Tiles(**PLAIN, paired=False, splits=3), id="walks shared by three"),
        pytest.param(Tiles(**PLAIN, persistent=True), id="persistent"),
        pytest.param(Tiles(**PLAIN, splits=3), id="keys shared by three"),
        pytest.param(Tiles(**PLAIN, splits=16), id="more shares than tiles"),
        pytest.param(Tiles(**PLAIN, descriptors=True), id="descriptors"),
        pytest.param(Tiles(**PLAIN, own_delta=True), id="delta of its own"),
        pytest.param(Tiles(**PLAIN, own_delta=True, splits=3), id="own delta, walks shared"),
        pytest.param(Tiles(**PLAIN, products="bf16x6"), id="numbers in parts"),
        pytest.param(Tiles(**PLAIN, products="bf16x6", descriptors=True), id="parts by engine"),
        pytest.param(Tiles(**PLAIN | {"kept": 16, "walked": 32}), id="walked longer than kept"),
    ],
)
@pytest.mark.parametrize(
    "shape",
    [
        pytest.param(Shape(keys=64, head_dim=16), id="whole tiles"),
        pytest.param(Shape(keys=75, queries=50, head_dim=16, heads=2), id="ragged"),
    ],
)
def test_every_way_gives_the_same_numbers(shape: Shape, tiles: Tiles, is_causal: bool) -> None:
    assert_right_in(shape, tiles, is_causal)


def assert_right_in(shape: Shape, tiles: Tiles, is_causal: bool) -> None:
    inputs = shape.inputs()

    ours = pass_through(inputs, is_causal, tiles)

    wide = tuple(x.double() for x in inputs)
    expected = output_and_gradients(lambda q, k, v: attend(q, k, v, is_causal)[0], *wide)
    for our, right in zip(ours, expected, strict=True):
        torch.testing.assert_close(our.double(), right, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(
    "tiles",
    [
        pytest.param(Tiles(**PLAIN, splits=3), id="walks shared"),
        pytest.param(Tiles(**PLAIN, own_delta=True), id="delta of its own"),
        pytest.param(Tiles(**PLAIN, products="bf16x6", splits=1), id="parts"),
        pytest.param(Tiles(**PLAIN, products="bf16x6", splits=3), id="parts, walks shared"),
    ],
)
def test_sharing_and_parts_find_their_batch_and_head(tiles: Tiles, is_causal: bool) -> None:
    shape = Shape(keys=37, queries=21, head_dim=12, batch=2, heads=4, group=2)

    assert_right_in(shape, tiles, is_causal)


def test_descriptors_are_left_out_where_strides_do_not_allow_them() -> None:
    inputs = Shape(keys=20, head_dim=17).inputs(torch.float16)  # rows of 34 bytes

    o, *_ = pass_through(inputs, True, Tiles(**PLAIN, descriptors=True))

    assert torch.equal(o, pass_through(inputs, True, Tiles(**PLAIN))[0])


def test_sharing_keys_leaves_the_bits_to_the_keys_order() -> None:
    inputs = Shape(keys=120, head_dim=16).inputs()
    shared = partial(pass_through, inputs, True, Tiles(**PLAIN, splits=4))

    assert all(map(torch.equal, shared(), shared()))


def test_shared_sums_are_fp32_whatever_type_is_pytorchs_default() -> None:
    inputs = Shape(keys=120, head_dim=16).inputs()
    shared = partial(pass_through, inputs, True, Tiles(**PLAIN, paired=False, splits=4))
    expected = shared()

    torch.set_default_dtype(torch.float16)
    try:
        found = shared()
    finally:
        torch.set_default_dtype(torch.float32)

    assert all(map(torch.equal, found, expected))


PROBLEM = Problem.of(torch.empty(1, 1, 64, 16), torch.empty(1, 1, 64, 16), True)


@pytest.fixture(autouse=True)
def _forgetful() -> Iterator[None]:
    yield
    launch.choose_with(None)


def test_what_does_not_fit_after_all_is_not_tried_again() -> None:
    tried: list[Tiles] = []

    def fits_when_small(tiles: Tiles) -> str:
        tried.append(tiles)
        if tiles.kept > 32:
            raise OutOfResources(300_000, 232_448, "shared memory")
        return "launched"

    first = launch.launch_fitting(PROBLEM, "forward", None, fits_when_small)
    failures = len(tried) - 1
    again = launch.launch_fitting(PROBLEM, "forward", None, fits_when_small)

    assert first == again == "launched"
    assert failures > 0
    assert len(tried) == failures + 2


def test_tiles_asked_for_by_name_fail_in_one_line_when_too_large() -> None:
    def never_fits(tiles: Tiles) -> None:
        raise OutOfResources(300_000, 232_448, "shared memory")

    with pytest.raises(launch.TilesTooLarge, match=r"32 x 16, 4 warps, 2 stages.*300000") as caught:
        launch.launch_fitting(PROBLEM, "forward", Tiles(**PLAIN), never_fits)

    assert "\n" not in str(caught.value)


def test_a_device_that_holds_nothing_says_so() -> None:
    def never_fits(tiles: Tiles) -> None:
        raise OutOfResources(300_000, 232_448, "shared memory")

    with pytest.raises(OutOfResources):
        launch.launch_fitting(PROBLEM, "forward", None, never_fits)


def test_a_chooser_decides_before_the_table() -> None:
    wanted = Tiles(**PLAIN)
    launch.choose_with(lambda problem, direction: wanted)

    assert launch.launch_fitting(PROBLEM, "forward", None, lambda tiles: tiles) is wanted

    launch.choose_with(None)
    assert launch.launch_fitting(PROBLEM, "forward", None, lambda tiles: tiles) is not wanted
