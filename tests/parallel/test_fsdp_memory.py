"""FSDP's whole weights are in memory a few at a time; none waits in autograd for backward.

Memory is counted where it is given out, by the C library: what autograd has saved is visible to no
garbage collector, and torch's profiler misses what is freed by the threads that communicate.
"""

import ctypes
import gc
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lmlab.parallel import FSDP, BucketedDDP
from lmlab.parallel.fsdp_blocks import each_alone, members_of_lists
from tests.parallel.launcher import RankPool
from tests.parallel.models import build
from tests.parallel.training import backward, batch_of, own_part

every_world = pytest.mark.parametrize("world_size", [2, 3], ids=lambda n: f"{n} ranks")

NUMBER, WIDTH = 16, 512
ONE_WEIGHT = 4 * WIDTH * WIDTH


MALLINFO2 = ["arena", "ordblks", "smblks", "hblks", "hblkhd"]
MALLINFO2 += ["usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"]


class MallocInfo(ctypes.Structure):
    """What glibc's mallinfo2 returns."""

    _fields_ = [(name, ctypes.c_size_t) for name in MALLINFO2]


def live_bytes() -> int:
    """Bytes that the program has and has not given back."""
    mallinfo2 = ctypes.CDLL(None).mallinfo2
    mallinfo2.restype = MallocInfo
    info = mallinfo2()
    return int(info.uordblks + info.hblkhd)


def can_count() -> bool:
    """Whether torch's memory comes from a C library that can tell."""
    if not hasattr(ctypes.CDLL(None), "mallinfo2"):
        return False
    before = live_bytes()
    held = torch.empty(2**20)
    return live_bytes() - before >= held.nbytes


needs_counting = pytest.mark.skipif(not can_count(), reason="the C library does not count memory")


class Meter:
    """Live bytes above those at the start, sampled while layers compute."""

    def __init__(self, module: nn.Module) -> None:
        self._start = live_bytes()
        self.highest = 0
        for layer in module.modules():
            if isinstance(layer, nn.Linear):
                layer.register_forward_hook(self._sample, prepend=True)

    def _sample(self, layer: nn.Module, inputs: Any, output: Tensor) -> None:
        self.read()
        if output.requires_grad:
            output.register_hook(lambda _: self.read() and None)

    def read(self) -> int:
        """Weights' worth of memory in use now."""
        now = live_bytes() - self._start
        self.highest = max(self.highest, now)
        return now


class Chain(nn.Module):
    """Equal layers, in blocks that may be recomputed."""

    def __init__(self, checkpointed: bool, a_block: int) -> None:
        super().__init__()
        self.checkpointed = checkpointed
        self.blocks = nn.ModuleList(
            nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(a_block)])
            for _ in range(NUMBER // a_block)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return x


def measure_step(
    compute_dtype: torch.dtype | None = None,
    checkpointed: bool = False,
    frozen: bool = False,
    a_block: int = 4,
    together: bool = False,
) -> dict[str, float]:
    """In weights: the highest and the remaining memory of forward and backward."""
    chain = Chain(checkpointed, a_block)
    if frozen:  # all but the first layer, so that backward goes through all of them
        chain.requires_grad_(False)
        chain.blocks[0][0].requires_grad_(True)
    blocks = members_of_lists if together else each_alone
    ours = FSDP(chain, compute_dtype, prefetch=1, blocks=blocks)
    x = torch.randn(1, WIDTH)
    for _ in range(2):  # the second step knows the order of layers
        for parameter in ours.parameters():
            parameter.grad = None
        gc.collect()  # what programs before this one have left is not of this step
        meter = Meter(ours)
        loss = ours(x).sum()
        dist.barrier()
        forward = meter.highest, meter.read()
        meter.highest = 0
        loss.backward()
        ours.finish_gradient_synchronization()
        dist.barrier()
        del loss
        after = meter.highest, meter.read()
    names = ["highest in forward", "after forward", "highest in backward", "after backward"]
    return dict(zip(names, (n / ONE_WEIGHT for n in (*forward, *after)), strict=True))


@needs_counting
@pytest.mark.parametrize("checkpointed", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("compute_dtype", [None, torch.bfloat16], ids=["fp32", "bf16"])
@every_world
def test_whole_weights_come_and_go(
    ranks: RankPool, world_size: int, compute_dtype: torch.dtype | None, checkpointed: bool
) -> None:
    for weights in ranks.run(
        measure_step, world_size, compute_dtype=compute_dtype, checkpointed=checkpointed
    ):
        # One in use, one arriving, and gloo's own copies: of sixteen.
        assert weights["highest in forward"] < 6
        assert weights["after forward"] < 1.5
        own_gradients = NUMBER / world_size
        assert weights["after backward"] == pytest.approx(own_gradients, abs=1.5)
        # Besides: weights as above (a block of four, if recomputed), and gradients on their way.
        assert weights["highest in backward"] < own_gradients + (13 if checkpointed else 10)


@needs_counting
@pytest.mark.parametrize("checkpointed", [False, True], ids=["kept", "recomputed"])
def test_frozen_weights_come_and_go_as_well(ranks: RankPool, checkpointed: bool) -> None:
    for weights in ranks.run(measure_step, 2, checkpointed=checkpointed, frozen=True):
        assert weights["after forward"] < 1.5
        assert weights["highest in backward"] < 9
        assert weights["after backward"] == pytest.approx(1 / 2, abs=1.5)


@needs_counting
@pytest.mark.parametrize("checkpointed", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("compute_dtype", [None, torch.bfloat16], ids=["fp32", "bf16"])
@every_world
def test_whole_blocks_come_and_go(
    ranks: RankPool, world_size: int, compute_dtype: torch.dtype | None, checkpointed: bool
) -> None:
    options = {"compute_dtype": compute_dtype, "checkpointed": checkpointed}
    for weights in ranks.run(measure_step, world_size, **options, a_block=2, together=True):
        # One block in use, one arriving, and gloo's own copies: of eight.
        assert weights["highest in forward"] < 2 * 6
        assert weights["after forward"] < 2 + 0.5  # the last block, with which backward begins
        own_gradients = NUMBER / world_size
        assert weights["after backward"] == pytest.approx(own_gradients, abs=2 * 1.5)
        # Besides: gradients that arrive, and those of one block on their way, with gloo's copies.
        assert weights["highest in backward"] < own_gradients + 2 * 7


@needs_counting
@pytest.mark.parametrize("checkpointed", [False, True], ids=["kept", "recomputed"])
def test_frozen_blocks_come_and_go_as_well(ranks: RankPool, checkpointed: bool) -> None:
    options = {"checkpointed": checkpointed, "frozen": True}
    for weights in ranks.run(measure_step, 2, **options, a_block=2, together=True):
        assert weights["after forward"] < 2 + 0.5
        assert weights["highest in backward"] < 2 * 6
        assert weights["after backward"] == pytest.approx(1 / 2, abs=2 * 1.5)


def wrap_and_drop(wrapper: str, model: str) -> bool:
    """Whether a wrapper and the module in it are gone as soon as nobody holds them."""
    module = build(model, 0)
    wrap = {"FSDP": FSDP, "BucketedDDP": lambda m: BucketedDDP(m, bucket_size_mb=1)}[wrapper]
    gc.collect()
    gc.disable()
    ours = wrap(module)
    backward(ours, own_part(batch_of(0, 0)))
    gone = [weakref.ref(ours), weakref.ref(module)]
    del ours, module
    gc.enable()
    return all(reference() is None for reference in gone)


@pytest.mark.parametrize("model", ["torch's layers", "blocks"])
@pytest.mark.parametrize("wrapper", ["FSDP", "BucketedDDP"])
def test_a_wrapper_that_is_dropped_is_freed_at_once(
    ranks: RankPool, wrapper: str, model: str
) -> None:
    assert all(ranks.run(wrap_and_drop, 2, wrapper=wrapper, model=model))
