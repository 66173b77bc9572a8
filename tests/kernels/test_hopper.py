"""The warp-specialised kernels of Hopper are right, in whatever order things happen.

On a CPU their groups of warps run as threads against real barriers (`warp_emulator`), through the
same host code that launches them on a GPU.
"""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lmlab.kernels import hopper, launch
from lmlab.kernels import problem as problem_module
from lmlab.kernels.configs import Tiles
from lmlab.kernels.hopper_sums import cells_of
from lmlab.kernels.problem import Processor, backward_plan, forward_plan
from tests.attention.reference import TOLERANCE, Shape, attend, output_and_gradients
from tests.kernels import warp_emulator
from tests.kernels.warp_emulator import Emulator, Pointer
from tests.kernels.warp_emulator import Tensor as Descriptor

pytestmark = pytest.mark.slow


class Emulated:
    """A kernel that launches on the emulator."""

    def __init__(self, kernel: Any) -> None:
        self.emulator = Emulator(kernel)
        self.launches = 0

    def __getitem__(self, grid: tuple[int]) -> Any:
        def run(*arguments: Any, num_warps: int, **constants: Any) -> str:
            assert num_warps == 4
            self.launches += 1
            self.emulator.launch(grid[0], *map(as_seen, arguments), **constants)
            return "compiled"

        return run


def as_seen(argument: Any) -> Any:
    """An argument of a launch as the emulator takes it."""
    if isinstance(argument, Tensor):
        everything = argument.as_strided(
            (argument.untyped_storage().nbytes() // argument.itemsize,), (1,)
        )
        return Pointer(everything.numpy())
    if hasattr(argument, "block_shape"):
        return Descriptor(argument.base, argument.block_shape)
    return argument


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> dict[str, Emulated]:
    """The kernels, emulated, on a CPU that takes itself for an H200 of one processor."""
    h200 = Processor("hopper", 1, 227 * 1024, 60 * 2**20)
    monkeypatch.setattr(problem_module, "processor", lambda device: h200)
    monkeypatch.setattr(hopper, "processor", lambda device: h200)
    forward_plan.cache_clear()
    backward_plan.cache_clear()
    names = [f"hopper_{part}_kernel" for part in ("forward", "keys", "queries", "once", "wide")]
    emulated = {name: Emulated(getattr(hopper, name)) for name in names}
    for name, kernel in emulated.items():
        monkeypatch.setattr(hopper, name, kernel)
    return emulated


def tiles_of(kept: int = 128, walked: int = 32, stages: int = 2) -> Tiles:
    return Tiles(kept=kept, walked=walked, warps=8, stages=stages, specialised=True)


SHAPES = [
    pytest.param(Shape(keys=256, head_dim=16), id="whole tiles"),
    pytest.param(Shape(keys=300, queries=172, head_dim=24, heads=2, batch=2), id="ragged"),
    pytest.param(Shape(keys=4, head_dim=16), id="shorter than a tile"),
]


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(
    "shape",
    [*SHAPES, pytest.param(Shape(keys=130, head_dim=16, heads=4, group=2), id="grouped heads")],
)
@pytest.mark.parametrize("tiles", [tiles_of(), tiles_of(192, 64, 3)], ids=["two groups", "three"])
def test_forward(tiles: Tiles, shape: Shape, is_causal: bool, kernels: dict[str, Emulated]) -> None:
    q, k, v, _ = shape.inputs(torch.float16)

    o, lse = launch.forward(q, k, v, is_causal=is_causal, scale=shape.head_dim**-0.5, tiles=tiles)

    assert kernels["hopper_forward_kernel"].launches == 1
    right, right_lse = attend(q.double(), k.double(), v.double(), is_causal)
    torch.testing.assert_close(o.double(), right, rtol=0, atol=TOLERANCE[torch.float16])
    torch.testing.assert_close(lse.double(), right_lse, rtol=0, atol=1e-5)


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("shape", SHAPES)
def test_backward(shape: Shape, is_causal: bool, kernels: dict[str, Emulated]) -> None:
    q, k, v, grad_o = shape.inputs(torch.float16)
    scale = shape.head_dim**-0.5
    wide = tuple(x.double() for x in (q, k, v, grad_o))
    right, right_lse = attend(*wide[:3], is_causal)

    grads = launch.backward(
        grad_o, q, k, v, right.half(), right_lse.float(),
        is_causal=is_causal, scale=scale, tiles=tiles_of(),
    )  # fmt: skip

    assert [kernels[f"hopper_{part}_kernel"].launches for part in ("keys", "queries")] == [1, 1]
    expected = output_and_gradients(lambda q, k, v: attend(q, k, v, is_causal)[0], *wide)[1:]
    for grad, correct in zip(grads, expected, strict=True):
        torch.testing.assert_close(grad.double(), correct, rtol=0, atol=TOLERANCE[torch.float16])


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(
    ("shape", "stages"),
    [
        pytest.param(Shape(keys=384, head_dim=64), 2, id="whole tiles"),
        pytest.param(Shape(keys=300, queries=172, head_dim=40, heads=2, batch=2), 3, id="ragged"),
        pytest.param(Shape(keys=4, head_dim=64), 2, id="shorter than a tile"),
        pytest.param(Shape(keys=640, head_dim=128), 2, id="wide"),
        pytest.param(Shape(keys=128, head_dim=128), 2, id="wide, one tile"),
        pytest.param(Shape(keys=460, queries=300, head_dim=104), 3, id="wide, ragged"),
        pytest.param(
            Shape(keys=256, queries=120, head_dim=128, heads=2, batch=2), 2, id="wide, many heads"
        ),
        pytest.param(Shape(keys=4, head_dim=128), 2, id="wide, shorter than a tile"),
    ],
)
def test_backward_in_one_walk(
    shape: Shape,
    stages: int,
    is_causal: bool,
    kernels: dict[str, Emulated],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    progress = torch.zeros(64, dtype=torch.int32)
    monkeypatch.setattr(hopper, "counters", lambda count, device: progress)
    q, k, v, grad_o = shape.inputs(torch.float16)
    wide = tuple(x.double() for x in (q, k, v, grad_o))
    right, right_lse = attend(*wide[:3], is_causal)

    grads = launch.backward(
        grad_o, q, k, v, right.half(), right_lse.float(),
        is_causal=is_causal, scale=shape.head_dim**-0.5,
        tiles=replace(tiles_of(walked=64, stages=stages), once=True),
    )  # fmt: skip

    assert not progress.any()  # as the next launch expects it
    is_one_walk = is_causal or shape.keys % 128 == 0
    name = "hopper_once_kernel" if shape.head_dim <= 64 else "hopper_wide_kernel"
    assert kernels[name].launches == int(is_one_walk)
    expected = output_and_gradients(lambda q, k, v: attend(q, k, v, is_causal)[0], *wide)[1:]
    for grad, correct in zip(grads, expected, strict=True):
        torch.testing.assert_close(grad.double(), correct, rtol=0, atol=TOLERANCE[torch.float16])


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("once", [False, True], ids=["two walks", "one walk"])
def test_scores_that_are_all_low_do_not_reach_beyond_the_last_key(
    once: bool, head_dim: int, is_causal: bool, kernels: dict[str, Emulated]
) -> None:
    """The log-sum-exp is then so low that a key that is not there has an infinite weight."""
    q, k, v, grad_o = Shape(keys=130, head_dim=head_dim).inputs(torch.float16)
    q, k = q / 16 + 4, k / 16 - 4
    wide = tuple(x.double() for x in (q, k, v, grad_o))
    right, right_lse = attend(*wide[:3], is_causal)
    assert torch.isinf(torch.exp(-right_lse.float())).all()

    grads = launch.backward(
        grad_o, q, k, v, right.half(), right_lse.float(),
        is_causal=is_causal, scale=head_dim**-0.5, tiles=replace(tiles_of(walked=64), once=once),
    )  # fmt: skip

    expected = output_and_gradients(lambda q, k, v: attend(q, k, v, is_causal)[0], *wide)[1:]
    for grad, correct in zip(grads, expected, strict=True):
        torch.testing.assert_close(grad.double(), correct, rtol=0, atol=2e-2)


@pytest.mark.parametrize(
    ("shape", "dtype", "tiles"),
    [
        pytest.param(Shape(keys=64, head_dim=17), torch.float16, tiles_of(), id="rows of 34 bytes"),
        pytest.param(Shape(keys=64, head_dim=16), torch.float32, tiles_of(), id="fp32"),
        pytest.param(Shape(keys=64, head_dim=16), torch.float16, tiles_of(kept=64), id="64 rows"),
        pytest.param(
            Shape(keys=64, head_dim=16),
            torch.float16,
            Tiles(kept=128, walked=32, warps=8, stages=2, specialised=True, splits=2),
            id="keys shared out",
        ),
    ],
)
def test_the_plain_kernel_runs_where_they_do_not_fit(
    shape: Shape, dtype: torch.dtype, tiles: Tiles, kernels: dict[str, Emulated]
) -> None:
    q, k, v, _ = shape.inputs(dtype)

    o, _ = launch.forward(q, k, v, is_causal=True, scale=0.25, tiles=tiles)

    assert kernels["hopper_forward_kernel"].launches == 0
    right, _ = attend(q.double(), k.double(), v.double(), True, 0.25)
    torch.testing.assert_close(o.double(), right, rtol=0, atol=TOLERANCE[dtype])


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_slot_reused_too_early_is_noticed(
    kernels: dict[str, Emulated], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The emulator's own test: without the wait for free slots it hangs or the numbers are off."""
    monkeypatch.setattr(warp_emulator, "PATIENCE_S", 0.5)
    wait_for_nothing(kernels["hopper_forward_kernel"], "produce")
    q, k, v, _ = Shape(keys=1024, head_dim=16).inputs(torch.float16)

    with pytest.raises(AssertionError):  # noqa: PT012 - either it hangs or the result is off
        o, _ = launch.forward(q, k, v, is_causal=False, scale=0.25, tiles=tiles_of())
        right, _ = attend(q.double(), k.double(), v.double(), False, 0.25)
        assert np.allclose(o.numpy(), right.numpy(), atol=1e-2)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("careless", ["produce", "add_share"])
def test_one_walk_that_does_not_wait_is_noticed(
    careless: str, kernels: dict[str, Emulated], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither for a free slot, nor for the program before to have added its share."""
    monkeypatch.setattr(warp_emulator, "PATIENCE_S", 0.5)
    wait_for_nothing(kernels["hopper_wide_kernel"], careless)
    q, k, v, grad_o = Shape(keys=640, head_dim=128).inputs(torch.float16)
    wide = tuple(x.double() for x in (q, k, v, grad_o))
    right, right_lse = attend(*wide[:3], True)

    with pytest.raises(AssertionError):  # noqa: PT012 - either it hangs or the result is off
        grads = launch.backward(
            grad_o, q, k, v, right.half(), right_lse.float(),
            is_causal=True, scale=128**-0.5, tiles=replace(tiles_of(walked=64), once=True),
        )  # fmt: skip
        correct = output_and_gradients(lambda q, k, v: attend(q, k, v, True)[0], *wide)[1:]
        for grad, expected in zip(grads, correct, strict=True):
            assert np.allclose(grad.numpy(), expected.numpy(), atol=TOLERANCE[torch.float16])


def wait_for_nothing(kernel: Emulated, name: str) -> None:
    """Let one function of a kernel pass every barrier at once."""
    world = kernel.emulator._kernel.__globals__
    function = world[name]
    careless = dict(function.__globals__)
    careless["mbarrier"] = SimpleNamespace(
        **vars(careless["mbarrier"]) | {"wait": lambda barrier, phase: None}
    )
    world[name] = type(function)(function.__code__, careless)


def test_four_sums_that_a_thread_holds_lie_together() -> None:
    """A thread's registers after a product of 64 rows and columns, and 512 bytes a warp."""
    cells = Emulator(cells_of)._kernel(Pointer(np.zeros(3 * 4096)), warp_emulator.wrap(2), None)
    offsets = cells.offset - 2 * 4096

    assert sorted(offsets.flatten()) == list(range(4096))
    warp, lane, eighth = np.ogrid[:4, :32, :8]
    row, column = 16 * warp + lane // 4, 8 * eighth + 2 * (lane % 4)
    four = [offsets[row + down, column + right] for down in (0, 8) for right in (0, 1)]
    assert all((four[n] == four[0] + n).all() for n in range(4))
    assert (four[0] % 128 == 4 * lane).all()


def is_hopper() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9


@pytest.mark.gpu
@pytest.mark.skipif(not is_hopper(), reason="needs a Hopper GPU")
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(
    ("head_dim", "tiles"),
    [
        pytest.param(64, tiles_of(128, 128, 2), id="64, blocks of 128"),
        pytest.param(64, tiles_of(192, 128, 3), id="64, three groups"),
        pytest.param(64, tiles_of(128, 64, 4), id="64, blocks of 64"),
        pytest.param(128, tiles_of(128, 128, 2), id="128, blocks of 128"),
        pytest.param(128, tiles_of(128, 64, 3), id="128, blocks of 64"),
        pytest.param(96, tiles_of(128, 64, 2), id="96"),
        pytest.param(256, tiles_of(128, 64, 2), id="256"),
    ],
)
def test_forward_on_a_gpu(head_dim: int, tiles: Tiles, is_causal: bool) -> None:
    shape = Shape(keys=1111, queries=1000, head_dim=head_dim, heads=20, batch=2)
    q, k, v, _ = shape.inputs(torch.bfloat16, "cuda")
    run = partial(launch.forward, q, k, v, is_causal=is_causal, scale=head_dim**-0.5, tiles=tiles)

    o, lse = run()

    right, right_lse = attend(q.double(), k.double(), v.double(), is_causal)
    torch.testing.assert_close(o.double(), right, rtol=0, atol=2e-2)
    torch.testing.assert_close(lse.double(), right_lse, rtol=0, atol=1e-3)
    assert all(torch.equal(o, run()[0]) for _ in range(20))


@pytest.mark.gpu
@pytest.mark.skipif(not is_hopper(), reason="needs a Hopper GPU")
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(
    ("head_dim", "tiles"),
    [
        pytest.param(64, tiles_of(128, 64, 3), id="64"),
        pytest.param(128, tiles_of(128, 64, 2), id="128"),
        pytest.param(128, tiles_of(128, 32, 3), id="128, blocks of 32"),
        pytest.param(64, replace(tiles_of(128, 64, 2), once=True), id="64, one walk"),
        pytest.param(64, replace(tiles_of(128, 64, 3), once=True), id="64, one walk, three slots"),
        pytest.param(128, replace(tiles_of(128, 64, 2), once=True), id="128, one walk"),
        pytest.param(
            128, replace(tiles_of(128, 64, 3), once=True), id="128, one walk, three slots"
        ),
        pytest.param(80, replace(tiles_of(128, 64, 2), once=True), id="80, one walk"),
    ],
)
def test_backward_on_a_gpu(head_dim: int, tiles: Tiles, is_causal: bool) -> None:
    # Without a mask one walk takes whole tiles of keys only.
    keys = 1152 if tiles.once and not is_causal else 1111
    shape = Shape(keys=keys, queries=1000, head_dim=head_dim, heads=4, batch=2)
    q, k, v, grad_o = shape.inputs(torch.bfloat16, "cuda")
    options = {"is_causal": is_causal, "scale": head_dim**-0.5}
    o, lse = launch.forward(q, k, v, **options)
    run = partial(launch.backward, grad_o, q, k, v, o, lse, tiles=tiles, **options)

    grads = run()

    wide = tuple(x.double() for x in (q, k, v, grad_o))
    expected = output_and_gradients(lambda q, k, v: attend(q, k, v, is_causal)[0], *wide)[1:]
    for grad, correct in zip(grads, expected, strict=True):
        torch.testing.assert_close(grad.double(), correct, rtol=0, atol=6e-2)
    assert all(all(map(torch.equal, grads, run())) for _ in range(20))
