"""A repeated launch passes the driver what Triton would have passed."""

import ctypes
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from lmlab.kernels import call, launch, step
from lmlab.kernels.configs import Tiles
from lmlab.kernels.step import DirectLaunches, Operand, Step, Tiled
from tests.kernels.conftest import FakeGpu, run

TILES = Tiles(block_m=64, block_n=64, warps=4, stages=2, splits=1)
FUSED = Tiles(block_m=64, block_n=128, warps=8, stages=2, warp_specialized=True, fused=True)


class Driver:
    """Records what it is passed: parameters as bytes, and the addresses of descriptors."""

    def __init__(self, sizes: list[int]) -> None:
        self.sizes, self.status = sizes, 0
        self.launched: list[Any] = []
        self.maps: list[Any] = []
        self.cuLaunchKernelEx = self._launch

    def _launch(self, config: Any, function: Any, addresses: Any, _: None) -> int:
        given = config._obj
        values = [ctypes.string_at(at, n) for at, n in zip(addresses, self.sizes, strict=True)]
        attribute = step.LaunchAttribute.from_address(given.attributes)
        shape = [
            *given.grid,
            *given.block,
            given.shared,
            given.count,
            attribute.id,
            *attribute.value,
        ]
        self.launched.append((function.value, shape, given.stream, values))
        return self.status

    def cuDevicePrimaryCtxRetain(self, context: Any, device: int) -> int:
        context._obj.value = 1 + device
        return 0

    def cuCtxSetCurrent(self, context: Any) -> int:
        self.status = 0 if context.value else step.NO_CONTEXT
        return 0

    def cuTensorMapEncodeTiled(self, *arguments: Any) -> int:
        self.maps.append(("encode", arguments[3].value, list(arguments[4]), list(arguments[5])))
        return 0

    def cuTensorMapReplaceAddress(self, buffer: Any, address: int) -> int:
        self.maps.append(("move", address))
        return 0


def int_of(raw: bytes) -> int:
    return int.from_bytes(raw, "little", signed=True)


def test_parameters_follow_the_signature(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver([8, 128, 4, 4, 4, 8, 8, 8, 4, 8, 4, 8, 8])
    monkeypatch.setattr(step, "cuda", lambda: driver)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 7, raising=False)
    x, y = torch.zeros(2, 3, 4), torch.zeros(8)
    plain = Operand(1, (8,), (1,), torch.float32)
    tiled = Tiled(Operand(0, (2, 3, 4), (12, 4, 1), torch.float32), (12, 4, 1), (1, 1, 4), None)
    signature = {
        "y": "*fp32", "x": "tensordesc<fp32[1,1,4]>", "n": "i32", "pair": ("i64", "constexpr"),
        "scale": "fp32", "one": "constexpr", "BLOCK": "constexpr",
    }  # fmt: skip
    meta = {"swizzle": 3, "block_size": [1, 1, 4]}
    compiled = SimpleNamespace(
        src=SimpleNamespace(signature=signature), function=99,
        metadata=SimpleNamespace(tensordesc_meta=[meta], num_warps=4, shared=9, launch_pdl=True),
    )  # fmt: skip
    launched = Step(None, (5,), (plain, tiled, 6, (2**40, 1), 0.5, 1), {})
    launched.compiled = compiled
    run = DirectLaunches([launched], 2, 0)
    moved = torch.zeros(2, 3, 4)
    for tensor in (x, x, moved):
        run([tensor.data_ptr(), y.data_ptr()])
    driver.status = step.NO_CONTEXT
    run([moved.data_ptr(), y.data_ptr()])
    assert len(driver.launched) == 5, "launched again with a context"
    driver.status = 700
    with pytest.raises(RuntimeError, match="CUDA error 700"):
        run([x.data_ptr(), y.data_ptr()])
    (function, shape, stream, values), *_ = driver.launched
    pdl = [1, 6, 1, *[0] * 15]  # one attribute, "programmatic stream serialization", allowed
    assert (function, shape, stream) == (99, [5, 1, 1, 128, 1, 1, 9, *pdl], 7)
    assert int_of(values[0]) == y.data_ptr()
    assert [int_of(raw) for raw in values[2:8]] == [2, 3, 4, 12, 4, 1]
    assert [int_of(values[8]), int_of(values[9])] == [6, 2**40]
    assert ctypes.c_float.from_buffer_copy(values[10]).value == 0.5
    assert values[11:] == [bytes(8), bytes(8)]  # scratch
    assert [entry[0] for entry in driver.maps] == ["encode", "move", "move"]  # if it moved
    assert driver.maps[0] == ("encode", x.data_ptr(), [4, 3, 2], [16, 48])


def inputs(length: int = 64, offset: int = 0, head_dim: int = 64) -> list[Tensor]:
    count = 2 * length * head_dim
    flat = [torch.zeros(count + offset, dtype=torch.float16)[offset:] for _ in range(5)]
    return [x.view(1, 2, length, head_dim) for x in flat]


@pytest.mark.slow
def test_a_changed_call_is_planned_again(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v, *_ = inputs()
    strided = torch.zeros(1, 64, 2, 64, dtype=torch.float16).transpose(1, 2)
    calls: list[tuple[list[Tensor], dict[str, Any]]] = [
        ([q, k, v], {}),
        (inputs(80), {}),
        (inputs(offset=1), {}),
        ([q, k, strided], {}),
        ([q, k, v], {"is_causal": False}),
        ([q, k, v], {"scale": 1.0}),
        ([q, k, v], {"tiles": None}),
    ]

    def run_all() -> None:
        for tensors, options in calls:
            defaults = {"is_causal": True, "scale": 0.125, "tiles": TILES}
            launch.forward(*tensors[:3], **defaults | options)

    run_all()
    run_all()
    assert len(launch._calls) == len(calls)
    with monkeypatch.context() as ranks:
        ranks.setattr(launch, "has_ranks", lambda: True)
        run_all()
    assert len(launch._calls) == 2 * len(calls)
    launch.forget_calls()
    monkeypatch.setattr(launch, "MAX_CALLS", 2)
    run_all()
    assert len(launch._calls) <= 2, "ever new shapes do not fill memory"


@pytest.mark.slow
def test_a_backward_is_found_from_its_forward(gpu: FakeGpu) -> None:
    q, k, v, grad_o, _ = inputs()
    options: Any = {"is_causal": True, "scale": 0.125}
    saved = q, k, v, *launch.forward(q, k, v, **options)
    call, _ = launch.find((q, k, v), *options.values())
    assert call is not None
    forward = call, [x.data_ptr() for x in saved]
    assert launch.follow(forward, grad_o, saved, **options) is None, "not planned yet"
    expected = launch.backward(grad_o, *saved, **options)
    found = launch.follow(forward, grad_o, saved, **options)
    assert [x.stride() for x in found or ()] == [x.stride() for x in expected]
    others = grad_o.mT.contiguous().mT, inputs(offset=1)[0]
    assert all(launch.follow(forward, other, saved, **options) is None for other in others)
    moved = q.clone(), *saved[1:]
    assert launch.follow(forward, grad_o, moved, **options) is None


@pytest.mark.slow
@pytest.mark.parametrize("tiles", [TILES, FUSED], ids=["portable", "fused"])
def test_a_repeated_call_has_memory_for_every_tensor(
    tiles: Tiles, gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched = Mock(device=None)  # on the current device
    monkeypatch.setattr(call, "DirectLaunches", lambda *_: launched)
    monkeypatch.setattr(call, "can_repeat", lambda compiled, device: True)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: None, raising=False)
    allocated: list[Tensor] = []

    def empty(shape: Any, strides: Any, dtype: torch.dtype) -> Tensor:
        allocated.append(torch.empty_strided(shape, strides, dtype=dtype))
        return allocated[-1]

    monkeypatch.setattr(call, "_empty_cuda", empty)
    q, k, v, o, grad_o = inputs(80)
    given = (grad_o, q, k, v, o, torch.zeros(1, 2, 80))
    for _ in range(2):
        grads = launch.backward(*given, is_causal=True, scale=0.125, tiles=tiles)
    launched.assert_called_once()
    (addresses,), (planned,) = launched.call_args.args, launch._calls.values()
    assert addresses[:6] == [x.data_ptr() for x in (*given[1:4], grad_o, *given[4:])]
    assert addresses[6:9] == [x.data_ptr() for x in grads]
    assert len(addresses) == len(planned.operands)
    scratch = [
        (at, at + x.shape[0] * x.strides[0] * x.dtype.itemsize)
        for at, x in zip(addresses[9:], planned.operands[9:], strict=True)
    ][: len(planned.scratches)]
    ends = [allocated[-1].data_ptr(), *(end for _, end in scratch)]
    assert all(start >= end for (start, _), end in zip(scratch, ends, strict=False))
    assert ends[-1] <= allocated[-1].data_ptr() + allocated[-1].nbytes


@pytest.mark.gpu
@pytest.mark.parametrize("length", [64, 77, 1024, 3001])
@pytest.mark.parametrize("head_dim", [32, 64, 80, 128, 256])
def test_repeated_calls_on_other_tensors_give_the_same_bits(length: int, head_dim: int) -> None:
    """The first launch is Triton's, the second ours; tensors have other addresses."""

    def repeated(seed: int) -> tuple[Tensor, ...]:
        torch.manual_seed(0)
        torch.empty(seed * 2**20, device="cuda")  # moves what follows
        inputs = torch.randn(4, 2, 16, length, head_dim, device="cuda").bfloat16()
        return run(inputs.unbind(), True)

    launch.forget_calls()
    first = repeated(1)
    held = [repeated(seed) for seed in range(2, 5)]
    assert all(all(map(torch.equal, first, other)) for other in held)
