"""The warp-specialized Hopper kernels are correct whatever the order of events.

On a CPU their warpgroups run as threads with real barriers (`warp_emulator`), through the same host
code that launches them on a GPU.
"""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lmlab.kernels import call, launch, step
from lmlab.kernels.configs import DeviceInfo, Tiles
from lmlab.kernels.hopper import launch as hopper
from lmlab.kernels.hopper.dq_accum import accum_pointers
from tests.attention.reference import TOLERANCE, Shape, attend, output_and_gradients
from tests.kernels import warp_emulator
from tests.kernels.conftest import SetDevice
from tests.kernels.warp_emulator import Descriptor, Emulator, Pointer

pytestmark = pytest.mark.slow

FORWARD, DKDV, DQ = "flash_fwd_hopper_kernel", "flash_bwd_dkdv_kernel", "flash_bwd_dq_kernel"
FUSED, FUSED_D128 = "flash_bwd_fused_kernel", "flash_bwd_fused_d128_kernel"
MASKS = pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
Gradients = tuple[Tensor, ...]


def forward_tiles(
    block_m: int = 128, block_n: int = 32, stages: int = 2, persistent: bool = True
) -> Tiles:
    return Tiles(
        block_m=block_m,
        block_n=block_n,
        warps=8,
        stages=stages,
        warp_specialized=True,
        persistent=persistent,
    )


def backward_tiles(block_m: int = 64, stages: int = 2, fused: bool = False) -> Tiles:
    return replace(forward_tiles(block_m, 128, stages), fused=fused)


class Emulated:
    """A kernel that launches on the emulator."""

    def __init__(self, kernel: Any) -> None:
        self.emulator = Emulator(kernel)
        self.launches = 0

    def __getitem__(self, grid: tuple[int]) -> Any:
        def run(*arguments: Any, num_warps: int, **constants: Any) -> str:
            assert num_warps == 4
            self.launches += 1
            self.emulator.launch(grid[0], *map(emulated, arguments), **constants)
            return "compiled"

        return run

    def ignore_waits(self, name: str) -> None:
        """Let one device function pass every barrier without waiting."""
        names = self.emulator._kernel.__globals__
        function = names[name]
        changed = dict(function.__globals__)
        changed["mbarrier"] = SimpleNamespace(
            **vars(changed["mbarrier"]) | {"wait": lambda barrier, phase: None}
        )
        names[name] = type(function)(function.__code__, changed)


def emulated(argument: Any) -> Any:
    """A launch argument in the emulator's terms."""
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
    names = (FORWARD, DKDV, DQ, FUSED, FUSED_D128)
    found = {name: Emulated(getattr(hopper, name)) for name in names}
    for name, kernel in found.items():
        monkeypatch.setattr(hopper, name, kernel)
    find = step.kernel_for
    monkeypatch.setattr(
        step, "kernel_for", lambda x, device: x if isinstance(x, Emulated) else find(x, device)
    )
    return found


@MASKS
@pytest.mark.parametrize(
    ("tiles", "shape"),
    [
        pytest.param(forward_tiles(), Shape(keys=256, head_dim=16), id="whole tiles"),
        pytest.param(
            forward_tiles(), Shape(keys=130, head_dim=16, heads=4, group=2), id="grouped heads"
        ),
        pytest.param(
            forward_tiles(192, 64, 3),
            Shape(keys=300, queries=172, head_dim=24, heads=2, batch=2),
            id="three consumers, ragged",
        ),
        pytest.param(
            forward_tiles(192, 64, 3), Shape(keys=4, head_dim=16), id="shorter than a tile"
        ),
    ],
)
def test_forward(tiles: Tiles, shape: Shape, is_causal: bool, kernels: dict[str, Emulated]) -> None:
    q, k, v, _ = shape.inputs(torch.float16)

    o, lse = launch.forward(q, k, v, is_causal=is_causal, scale=shape.head_dim**-0.5, tiles=tiles)

    assert kernels[FORWARD].launches == 1
    expected, expected_lse = attend(q.double(), k.double(), v.double(), is_causal)
    torch.testing.assert_close(o.double(), expected, rtol=0, atol=TOLERANCE[torch.float16])
    torch.testing.assert_close(lse.double(), expected_lse, rtol=0, atol=1e-5)


def gradients(inputs: Gradients, is_causal: bool, tiles: Tiles) -> tuple[Gradients, Gradients]:
    """Gradients by the kernels and by the formula in float64."""
    q, k, v, grad_o = inputs
    wide = tuple(x.double() for x in inputs)
    o, lse = attend(*wide[:3], is_causal)
    found = launch.backward(
        grad_o, q, k, v, o.half(), lse.float(),
        is_causal=is_causal, scale=q.shape[-1] ** -0.5, tiles=tiles,
    )  # fmt: skip
    expected = output_and_gradients(lambda q, k, v: attend(q, k, v, is_causal)[0], *wide)[1:]
    return found, expected


def assert_gradients(
    inputs: Gradients, is_causal: bool, tiles: Tiles, atol: float = TOLERANCE[torch.float16]
) -> None:
    for grad, expected in zip(*gradients(inputs, is_causal, tiles), strict=True):
        torch.testing.assert_close(grad.double(), expected, rtol=0, atol=atol)


@MASKS
@pytest.mark.parametrize(
    "shape",
    [
        pytest.param(Shape(keys=300, queries=172, head_dim=24, heads=2, batch=2), id="ragged"),
        pytest.param(Shape(keys=4, head_dim=16), id="shorter than a tile"),
    ],
)
def test_backward_in_two_passes(
    shape: Shape, is_causal: bool, kernels: dict[str, Emulated]
) -> None:
    assert_gradients(shape.inputs(torch.float16), is_causal, backward_tiles(block_m=32))

    assert [kernels[name].launches for name in (DKDV, DQ)] == [1, 1]


@pytest.mark.parametrize(
    ("shape", "is_causal", "stages"),
    [
        pytest.param(Shape(keys=384, head_dim=64), True, 2, id="64"),
        pytest.param(Shape(keys=256, head_dim=64), False, 2, id="64, full"),
        pytest.param(
            Shape(keys=300, queries=172, head_dim=40, heads=2, batch=2), True, 3, id="64, ragged"
        ),
        pytest.param(Shape(keys=4, head_dim=64), True, 2, id="64, short"),
        pytest.param(Shape(keys=640, head_dim=128), True, 2, id="128"),
        pytest.param(Shape(keys=256, head_dim=128), False, 2, id="128, full"),
        pytest.param(Shape(keys=460, queries=300, head_dim=104), True, 3, id="128, ragged"),
        pytest.param(
            Shape(keys=256, queries=120, head_dim=128, heads=2, batch=2), True, 2, id="128, heads"
        ),
        pytest.param(Shape(keys=4, head_dim=128), True, 2, id="128, short"),
    ],
)
def test_fused_backward(
    shape: Shape,
    is_causal: bool,
    stages: int,
    kernels: dict[str, Emulated],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    semaphores = torch.zeros(64, dtype=torch.int32)
    monkeypatch.setattr(call, "semaphores", lambda count, device: semaphores)

    assert_gradients(
        shape.inputs(torch.float16), is_causal, backward_tiles(stages=stages, fused=True)
    )

    assert kernels[FUSED if shape.head_dim <= 64 else FUSED_D128].launches == 1
    assert not semaphores.any()  # as the next launch expects them


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@MASKS
@pytest.mark.parametrize("head_dim", [64, 128])
def test_low_scores_do_not_reach_past_the_last_key(
    head_dim: int, is_causal: bool, kernels: dict[str, Emulated]
) -> None:
    """Keys past the end read as zeros, and exp(-lse) is infinite where all scores are low."""
    q, k, v, grad_o = Shape(keys=130, head_dim=head_dim).inputs(torch.float16)
    q, k = q / 16 + 4, k / 16 - 4
    _, lse = attend(q.double(), k.double(), v.double(), is_causal)
    assert torch.isinf(torch.exp(-lse.float())).all()

    assert_gradients((q, k, v, grad_o), is_causal, backward_tiles(fused=True), atol=2e-2)

    assert kernels[FUSED if head_dim == 64 else FUSED_D128].launches == 1


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
    ("kernel", "function"),
    [(FORWARD, "kv_producer"), (FUSED_D128, "producer"), (FUSED_D128, "accumulate_dq")],
)
def test_the_emulator_detects_a_missing_wait(
    kernel: str, function: str, kernels: dict[str, Emulated], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without waiting for an empty stage, or for the previous program, it hangs or is wrong."""
    monkeypatch.setattr(warp_emulator, "BARRIER_TIMEOUT_S", 0.5)
    kernels[kernel].ignore_waits(function)

    if kernel == FORWARD:
        q, k, v, _ = Shape(keys=1024, head_dim=16).inputs(torch.float16)
        expected, _ = attend(q.double(), k.double(), v.double(), False, 0.25)
        with pytest.raises(AssertionError):  # noqa: PT012 - it hangs or the result is wrong
            o, _ = launch.forward(q, k, v, is_causal=False, scale=0.25, tiles=forward_tiles())
            assert np.allclose(o.numpy(), expected.numpy(), atol=1e-2)
    else:
        inputs = Shape(keys=640, head_dim=128).inputs(torch.float16)
        with pytest.raises(AssertionError):
            assert_gradients(inputs, True, backward_tiles(fused=True))


def test_four_accumulators_of_a_thread_are_adjacent() -> None:
    """Registers of a thread after a 64 x 64 product, and 512 contiguous bytes per warp."""
    pointers = Emulator(accum_pointers)._kernel(
        Pointer(np.zeros(3 * 4096)), warp_emulator.wrap(2), None
    )
    offsets = pointers.offset - 2 * 4096

    assert sorted(offsets.flatten()) == list(range(4096))
    warp, lane, eighth = np.ogrid[:4, :32, :8]
    row, column = 16 * warp + lane // 4, 8 * eighth + 2 * (lane % 4)
    four = [offsets[row + down, column + right] for down in (0, 8) for right in (0, 1)]
    assert all((four[n] == four[0] + n).all() for n in range(4))
    assert (four[0] % 128 == 4 * lane).all()


def is_hopper() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9


needs_hopper = pytest.mark.skipif(not is_hopper(), reason="needs a Hopper GPU")


@pytest.mark.gpu
@needs_hopper
@MASKS
@pytest.mark.parametrize(
    ("head_dim", "tiles"),
    [
        (64, forward_tiles(128, 128, 2)),
        (64, forward_tiles(192, 128, 3)),
        (64, forward_tiles(128, 64, 4)),
        (128, forward_tiles(128, 128, 2)),
        (128, forward_tiles(128, 64, 3)),
        (96, forward_tiles(128, 64, 2)),
        (256, forward_tiles(128, 64, 2)),
    ],
    ids=str,
)
def test_forward_on_a_gpu(head_dim: int, tiles: Tiles, is_causal: bool) -> None:
    shape = Shape(keys=1111, queries=1000, head_dim=head_dim, heads=20, batch=2)
    q, k, v, _ = shape.inputs(torch.bfloat16, "cuda")
    run = partial(launch.forward, q, k, v, is_causal=is_causal, scale=head_dim**-0.5, tiles=tiles)

    o, lse = run()

    expected, expected_lse = attend(q.double(), k.double(), v.double(), is_causal)
    torch.testing.assert_close(o.double(), expected, rtol=0, atol=2e-2)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=0, atol=1e-3)
    assert all(torch.equal(o, run()[0]) for _ in range(20))


@pytest.mark.gpu
@needs_hopper
@MASKS
@pytest.mark.parametrize(
    ("head_dim", "tiles"),
    [
        (64, backward_tiles(64, 3)),
        (128, backward_tiles(64, 2)),
        (128, backward_tiles(32, 3)),
        (64, backward_tiles(64, 2, fused=True)),
        (64, backward_tiles(64, 3, fused=True)),
        (128, backward_tiles(64, 2, fused=True)),
        (128, backward_tiles(64, 3, fused=True)),
        (80, backward_tiles(64, 2, fused=True)),
        (256, backward_tiles(32, 2)),
        (200, backward_tiles(32, 3)),
    ],
    ids=str,
)
def test_backward_on_a_gpu(head_dim: int, tiles: Tiles, is_causal: bool) -> None:
    shape = Shape(keys=1111, queries=1000, head_dim=head_dim, heads=4, batch=2)
    q, k, v, grad_o = shape.inputs(torch.bfloat16, "cuda")
    options = {"is_causal": is_causal, "scale": head_dim**-0.5}
    o, lse = launch.forward(q, k, v, **options)
    run = partial(launch.backward, grad_o, q, k, v, o, lse, tiles=tiles, **options)

    grads = run()

    wide = tuple(x.double() for x in (q, k, v, grad_o))
    expected = output_and_gradients(lambda q, k, v: attend(q, k, v, is_causal)[0], *wide)[1:]
    for grad, right in zip(grads, expected, strict=True):
        torch.testing.assert_close(grad.double(), right, rtol=0, atol=6e-2)
    assert all(all(map(torch.equal, grads, run())) for _ in range(20))
