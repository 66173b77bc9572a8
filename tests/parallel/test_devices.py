"""The same training with every backend and device: CPU ranks, a shared GPU, a GPU per rank."""

import pytest
import torch
from torch import nn

from lmlab.parallel import FSDP, FlatDDP, ShardedOptimizer
from tests.parallel.launcher import LARGEST_WORLD, RankPool
from tests.parallel.models import build
from tests.parallel.training import SCHEMES, SGD_SETTINGS, batch_of, own_part, train_both

# A GPU may sum in another order than one process.
TOLERANCE = 1e-5
GPUS = torch.cuda.device_count()
needs_gpu = [pytest.mark.gpu, pytest.mark.skipif(GPUS == 0, reason="needs a CUDA GPU")]

every_machine = pytest.mark.parametrize(
    ("backend", "device", "world_size"),
    [
        pytest.param("gloo", "cpu", 2, id="gloo_cpu"),
        pytest.param("gloo", "cuda:0", 2, id="gloo_shared_gpu", marks=needs_gpu),
        pytest.param("nccl", "cuda", min(GPUS, LARGEST_WORLD), id="nccl", marks=needs_gpu),
    ],
)


def train(device: str) -> None:
    batches = [batch_of(step).to(device) for step in range(5)]
    for wrap in SCHEMES.values():
        wrapped, alone = wrap(build("blocks").to(device)), build("blocks").to(device)
        train_both(wrapped, alone, batches, TOLERANCE)

    wrapped, alone = FlatDDP(build("layers").to(device)), build("layers").to(device)
    sharded = ShardedOptimizer(wrapped.parameters(), torch.optim.SGD, **SGD_SETTINGS)
    train_both(wrapped, alone, batches, TOLERANCE, sharded)
    adam = ShardedOptimizer(wrapped.parameters(), torch.optim.AdamW)
    adam.step()
    state = adam.state_dict()
    assert len(state["state"]) == len(list(wrapped.parameters()))
    assert {t.device.type for s in state["state"].values() for t in s.values()} == {"cpu"}
    adam.load_state_dict(state)
    adam.step()


@every_machine
def test_training_follows_one_process(
    ranks: RankPool, backend: str, device: str, world_size: int
) -> None:
    ranks.run(train, world_size, backend=backend, device=device)


def losses_in_bf16(device: str) -> tuple[float, float]:
    wrapped = FSDP(build("transformer").to(device), torch.bfloat16)
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=0.01)
    losses = []
    for _ in range(10):
        optimizer.zero_grad()
        loss = wrapped(own_part(batch_of(0)).to(device)).float().square().mean()
        loss.backward()
        wrapped.finish_gradient_synchronization()
        optimizer.step()
        losses.append(loss.item())
    return losses[0], losses[-1]


@every_machine
def test_fsdp_learns_in_bf16(ranks: RankPool, backend: str, device: str, world_size: int) -> None:
    for first, last in ranks.run(losses_in_bf16, world_size, backend=backend, device=device):
        assert last < 0.9 * first


def gpu_memory_of_forward(device: str, block_size: int) -> tuple[float, float]:
    """Memory left by a forward and its peak, in units of one weight."""
    width, number = 1024, 16
    blocks = [
        nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(block_size)])
        for _ in range(number // block_size)
    ]
    wrapped = FSDP(nn.Sequential(*blocks).to(device), prefetch=1, blocks=lambda _: blocks)
    x = torch.randn(1, width, device=device)
    for _ in range(2):
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        output = wrapped(x)
        torch.cuda.synchronize()
        left = torch.cuda.memory_allocated() - before
        peak = torch.cuda.max_memory_allocated() - before
        output.sum().backward()
        wrapped.finish_gradient_synchronization()
        wrapped.zero_grad()
    return left / (4 * width**2), peak / (4 * width**2)


@pytest.mark.gpu
@pytest.mark.skipif(GPUS == 0, reason="needs a CUDA GPU")
@pytest.mark.parametrize("block_size", [1, 2])
def test_full_weights_come_and_go_on_a_gpu(ranks: RankPool, block_size: int) -> None:
    for left, peak in ranks.run(gpu_memory_of_forward, 2, device="cuda:0", block_size=block_size):
        assert left < block_size + 0.5  # the last block stays for backward
        assert peak < 6 * block_size
