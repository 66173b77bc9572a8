"""The warp-specialized Hopper kernels, their warpgroups as threads with real barriers on a CPU."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lmlab.kernels import call, launch, step
from lmlab.kernels.configs import Tiles
from lmlab.kernels.hopper import launch as hopper
from lmlab.kernels.hopper.bwd_fused import accum_pointers
from lmlab.kernels.problem import DeviceInfo
from tests.attention.reference import TOLERANCE, Shape, attend, exact
from tests.kernels import warp_emulator
from tests.kernels.conftest import SetDevice, run
from tests.kernels.warp_emulator import Descriptor, Emulator, Pointer, wrap

pytestmark = pytest.mark.slow

FORWARD, DKDV, DQ = "flash_fwd_hopper_kernel", "flash_bwd_dkdv_kernel", "flash_bwd_dq_kernel"
WIDE = "flash_bwd_dkdv_wide_kernel"
FUSED = "flash_bwd_fused_kernel"
MASKS = pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
Gradients = tuple[Tensor, ...]


def forward_tiles(block_m: int = 128, block_n: int = 32, stages: int = 2) -> Tiles:
    size = {"block_m": block_m, "block_n": block_n, "warps": 8, "stages": stages}
    return Tiles(**size, warp_specialized=True)


def backward_tiles(block_m: int = 64, stages: int = 2, fused: bool = False) -> Tiles:
    return replace(forward_tiles(block_m, 128, stages), fused=fused)


class Emulated:
    """A kernel that launches on the emulator."""

    def __init__(self, kernel: Any) -> None:
        self.emulator = Emulator(kernel)
        self.launches = 0

    def __getitem__(self, grid: tuple[int]) -> Any:
        def run(*arguments: Any, SHAPE: Any, num_warps: int, **options: bool) -> str:
            assert num_warps == 4
            self.launches += 1
            sizes = {name: size.value for name, size in vars(SHAPE).items()}
            shape = SimpleNamespace(**sizes, S_LAYOUT=None, O_LAYOUT=None)
            self.emulator.launch(grid[0], *map(emulated, arguments), SHAPE=shape)
            return "compiled"

        return run

    def ignore_waits(self, name: str) -> None:
        """Let one device function pass every barrier without waiting."""
        names = self.emulator._kernel.__globals__
        function = names[name]
        barriers = vars(function.__globals__["mbarrier"]) | {"wait": lambda barrier, phase: None}
        changed = function.__globals__ | {"mbarrier": SimpleNamespace(**barriers)}
        names[name] = type(function)(function.__code__, changed)


def emulated(argument: Any) -> Any:
    if isinstance(argument, Tensor):
        elements = argument.untyped_storage().nbytes() // argument.itemsize
        return Pointer(argument.as_strided((elements,), (1,)).numpy())
    if hasattr(argument, "block_shape"):
        return Descriptor(argument.base, argument.block_shape)
    return argument


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch, set_device: SetDevice) -> dict[str, Emulated]:
    """The kernels, emulated, on a CPU that passes for an H200 with one SM."""
    set_device(DeviceInfo("hopper", 1, 227 * 1024, 60 * 2**20))
    names = (FORWARD, DKDV, WIDE, DQ, FUSED)
    found = {name: Emulated(getattr(hopper, name)) for name in names}
    for name, kernel in found.items():
        monkeypatch.setattr(hopper, name, kernel)
    find = step.kernel_for
    monkeypatch.setattr(
        step, "kernel_for", lambda x, device: x if isinstance(x, Emulated) else find(x, device)
    )
    return found


RAGGED = Shape(keys=300, queries=172, head_dim=24, heads=2, batch=2)
SHORT = Shape(keys=4, head_dim=16)


@MASKS
@pytest.mark.parametrize(
    ("tiles", "shape"),
    [
        pytest.param(forward_tiles(), Shape(keys=256, head_dim=16), id="whole tiles"),
        pytest.param(forward_tiles(), Shape(130, 16, heads=4, group=2), id="grouped heads"),
        pytest.param(forward_tiles(192, 64, 3), RAGGED, id="three consumers, ragged"),
        pytest.param(forward_tiles(192, 64, 3), SHORT, id="shorter than a tile"),
        pytest.param(forward_tiles(), Shape(keys=300, queries=172, head_dim=136), id="192"),
        pytest.param(replace(forward_tiles(), programs_per_sm=2), RAGGED, id="two per SM"),
    ],
)
def test_forward(tiles: Tiles, shape: Shape, is_causal: bool, kernels: dict[str, Emulated]) -> None:
    assert_forward(shape, is_causal, tiles)
    assert kernels[FORWARD].launches == 1


def assert_forward(shape: Shape, is_causal: bool, tiles: Tiles) -> None:
    q, k, v, _ = shape.inputs(torch.float16)
    o, lse = launch.forward(q, k, v, is_causal=is_causal, scale=shape.head_dim**-0.5, tiles=tiles)
    expected, expected_lse = attend(q.double(), k.double(), v.double(), is_causal)
    torch.testing.assert_close(o.double(), expected, rtol=0, atol=TOLERANCE[torch.float16])
    torch.testing.assert_close(lse.double(), expected_lse, rtol=0, atol=1e-5)


def assert_gradients(
    inputs: Gradients, is_causal: bool, tiles: Tiles, atol: float = TOLERANCE[torch.float16]
) -> None:
    q, k, v, grad_o = inputs
    o, lse = attend(*(x.double() for x in inputs[:3]), is_causal)
    found = launch.backward(
        grad_o, q, k, v, o.half(), lse.float(),
        is_causal=is_causal, scale=q.shape[-1] ** -0.5, tiles=tiles,
    )  # fmt: skip
    expected = exact(inputs, is_causal)[1:]
    torch.testing.assert_close(found, expected, rtol=0, atol=atol, check_dtype=False)


@MASKS
@pytest.mark.parametrize(
    ("shape", "dkdv"),
    [
        pytest.param(RAGGED, DKDV, id="ragged"),
        pytest.param(SHORT, DKDV, id="shorter than a tile"),
        pytest.param(Shape(keys=256, queries=172, head_dim=72), DKDV, id="96"),
        pytest.param(Shape(keys=300, queries=172, head_dim=136), WIDE, id="192"),
        pytest.param(Shape(keys=256, head_dim=256), WIDE, id="256"),
    ],
)
def test_two_passes(shape: Shape, dkdv: str, is_causal: bool, kernels: dict[str, Emulated]) -> None:
    assert_gradients(shape.inputs(torch.float16), is_causal, backward_tiles(block_m=32))
    assert {name for name, kernel in kernels.items() if kernel.launches} == {dkdv, DQ}


@pytest.mark.parametrize(
    ("shape", "is_causal", "sms", "stages"),
    [
        pytest.param(Shape(keys=384, head_dim=64), True, 3, 2, id="64"),
        pytest.param(Shape(keys=256, head_dim=64), False, 1, 2, id="more programs than SMs"),
        pytest.param(Shape(keys=384, heads=2, head_dim=64), False, 3, 2, id="rotated"),
        pytest.param(Shape(300, 40, heads=3), False, 3, 2, id="uneven segments"),
        pytest.param(Shape(200, 64, queries=300, heads=2), False, 3, 3, id="long segments"),
        pytest.param(replace(RAGGED, head_dim=40), True, 1, 3, id="64, ragged"),
        pytest.param(replace(SHORT, head_dim=64), True, 1, 2, id="64, short"),
    ],
)
def test_fused_backward(
    shape: Shape, is_causal: bool, sms: int, stages: int, kernels: dict[str, Emulated], set_device:
    SetDevice, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    set_device(DeviceInfo("hopper", sms, 227 * 1024, 60 * 2**20))
    semaphores = torch.zeros(64, dtype=torch.int32)
    monkeypatch.setattr(call, "semaphores", lambda count, device: semaphores)
    tiles = replace(backward_tiles(stages=stages, fused=True), rotated=True)  # where it can
    assert_gradients(shape.inputs(torch.float16), is_causal, tiles)
    assert kernels[FUSED].launches == 1
    assert not semaphores.any()  # as the next launch expects them


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@MASKS
def test_low_scores_end_at_the_last_key(is_causal: bool, kernels: dict[str, Emulated]) -> None:
    """Keys past the end read as zeros, and exp(-lse) is infinite where all scores are low."""
    q, k, v, grad_o = Shape(keys=130, head_dim=64).inputs(torch.float16)
    q, k = q / 16 + 4, k / 16 - 4
    _, lse = attend(q.double(), k.double(), v.double(), is_causal)
    assert torch.isinf(torch.exp(-lse.float())).all()
    assert_gradients((q, k, v, grad_o), is_causal, backward_tiles(fused=True), atol=2e-2)
    assert kernels[FUSED].launches == 1


@pytest.mark.parametrize(
    ("head_dim", "dtype", "tiles"),
    [
        pytest.param(17, torch.float16, forward_tiles(), id="rows of 34 bytes"),
        pytest.param(16, torch.float32, forward_tiles(), id="fp32"),
        pytest.param(16, torch.float16, forward_tiles(64), id="one consumer"),
        pytest.param(16, torch.float16, replace(forward_tiles(), splits=2), id="split keys"),
    ],
)
def test_the_portable_kernel_runs_where_these_cannot(
    head_dim: int, dtype: torch.dtype, tiles: Tiles, kernels: dict[str, Emulated]
) -> None:
    q, k, v, _ = Shape(keys=64, head_dim=head_dim).inputs(dtype)
    o, _ = launch.forward(q, k, v, is_causal=True, scale=0.25, tiles=tiles)
    assert kernels[FORWARD].launches == 0
    expected, _ = attend(q.double(), k.double(), v.double(), True, 0.25)
    torch.testing.assert_close(o.double(), expected, rtol=0, atol=TOLERANCE[dtype])


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize(
    ("kernel", "function"), [(FORWARD, "kv_producer"), (FUSED, "producer"), (FUSED, "dq_warpgroup")]
)
def test_the_emulator_detects_a_missing_wait(
    kernel: str, function: str, kernels: dict[str, Emulated], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without waiting for an empty stage, or for the previous program, it hangs or is wrong."""
    monkeypatch.setattr(warp_emulator, "BARRIER_TIMEOUT_S", 0.5)
    monkeypatch.setattr(warp_emulator, "runs_ahead", function)
    kernels[kernel].ignore_waits(function)
    inputs = Shape(keys=640, head_dim=64).inputs(torch.float16)
    run = partial(assert_gradients, inputs, True, backward_tiles(fused=True))
    if kernel == FORWARD:
        run = partial(assert_forward, Shape(keys=1024, head_dim=16), False, forward_tiles())
    with pytest.raises(AssertionError):
        run()


def test_four_accumulators_of_a_thread_are_adjacent() -> None:
    """Registers of a thread after a 64 x 64 product, and 512 contiguous bytes per warp."""
    pointers = Emulator(accum_pointers)._kernel(Pointer(np.zeros(3 * 4096)), wrap(2), None)
    offsets = pointers.offset - 2 * 4096
    assert sorted(offsets.flatten()) == list(range(4096))
    warp, lane, eighth = np.ogrid[:4, :32, :8]
    row, column = 16 * warp + lane // 4, 8 * eighth + 2 * (lane % 4)
    four = [offsets[row + down, column + right] for down in (0, 8) for right in (0, 1)]
    assert all((four[n] == four[0] + n).all() for n in range(4))
    assert (four[0] % 128 == 4 * lane).all()


IS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
TILES = [
    *((64, forward_tiles(*sizes)) for sizes in ((128, 128, 2), (192, 128, 3), (128, 64, 4))),
    *((128, forward_tiles(*sizes)) for sizes in ((128, 128, 2), (128, 64, 3))),
    *((head_dim, forward_tiles(128, 64, 2)) for head_dim in (96, 152, 192, 256)),
]
BACKWARD_TILES = [
    *((64, backward_tiles(64, 3)), (128, backward_tiles(32, 3)), (32, backward_tiles(64, 2))),
    *((64, backward_tiles(64, stages, fused=True)) for stages in (2, 3)),
    (64, replace(backward_tiles(fused=True), rotated=True)),
    *((head_dim, backward_tiles(64, 2)) for head_dim in (80, 128, 152, 192)),
    *((head_dim, backward_tiles(32, 2)) for head_dim in (200, 256)),
]


@pytest.mark.gpu
@pytest.mark.skipif(not IS_HOPPER, reason="needs a Hopper GPU")
@MASKS
@pytest.mark.parametrize(
    ("head_dim", "forward", "backward"),
    [*((d, tiles, None) for d, tiles in TILES), *((d, None, t) for d, t in BACKWARD_TILES)],
    ids=str,
)
def test_on_a_gpu(head_dim: int, forward: Any, backward: Any, is_causal: bool) -> None:
    queries = 1000 if is_causal else 1200
    shape = Shape(keys=1111, queries=queries, head_dim=head_dim, heads=20, batch=2)
    inputs = shape.inputs(torch.bfloat16, "cuda")
    launched = partial(run, inputs, is_causal, forward, backward)
    o, lse, *grads = found = launched()
    expected_o, *expected = exact(inputs, is_causal)
    _, expected_lse = attend(*(x.double() for x in inputs[:3]), is_causal)
    near = partial(torch.testing.assert_close, check_dtype=False, rtol=0)
    near(lse, expected_lse, atol=1e-3)
    near(o, expected_o, atol=2e-2)
    near(grads, expected, atol=6e-2)
    assert all(all(map(torch.equal, found, launched())) for _ in range(20))
