"""The same programs on every kind of device and backend: CPU ranks, a shared GPU, a GPU each."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lmlab.parallel import FSDP, BucketedDDP, ShardedOptimizer
from tests.parallel.launcher import LARGEST_WORLD, RankPool
from tests.parallel.models import build
from tests.parallel.training import (
    WRAPPERS,
    assert_near,
    backward,
    batch_of,
    own_part,
    parameters,
    sgd,
)

GPUS = torch.cuda.device_count()
needs_gpu = [pytest.mark.gpu, pytest.mark.skipif(GPUS == 0, reason="needs a CUDA GPU")]

every_machine = pytest.mark.parametrize(
    ("backend", "device", "world_size"),
    [
        pytest.param("gloo", "cpu", 2, id="gloo on CPU ranks"),
        pytest.param("gloo", "cuda:0", 2, id="gloo on a GPU that ranks share", marks=needs_gpu),
        pytest.param(
            "nccl", "cuda", min(GPUS, LARGEST_WORLD), id="nccl on a GPU each", marks=needs_gpu
        ),
    ],
)


def train(
    device: str, wrapped: Any, module: nn.Module, optimizer: Any, model: str = "torch's layers"
) -> None:
    """Five steps beside one process; products may be summed in another order on a GPU."""
    alone = build(model, seed=0).to(device)
    its_optimizer = sgd(alone.parameters())
    for step in range(5):
        batch = batch_of(0, step).to(device)
        for model, steps, part in (
            (wrapped, optimizer, own_part(batch)),
            (alone, its_optimizer, batch),
        ):
            steps.zero_grad()
            backward(model, part)
            steps.step()
    whole = wrapped.gather_full_parameters() if isinstance(wrapped, FSDP) else parameters(module)
    assert_near(whole, parameters(alone), 1e-5)


def train_every_wrapper(device: str, carrier: str) -> None:
    assert dist.get_backend() == carrier
    every = [(wrap, "torch's layers") for wrap in (*WRAPPERS.values(), FSDP)]
    for wrap, model in (*every, (FSDP, "blocks")):
        module = build(model, seed=dist.get_rank()).to(device)
        wrapped = wrap(module)
        train(device, wrapped, module, sgd(wrapped.parameters()), model)


@every_machine
def test_every_wrapper_follows_one_process(
    ranks: RankPool, backend: str, device: str, world_size: int
) -> None:
    ranks.run(train_every_wrapper, world_size, backend=backend, device=device, carrier=backend)


def train_sharded(device: str) -> None:
    module = build("torch's layers", seed=0).to(device)
    wrapped = BucketedDDP(module, bucket_size_mb=1)
    settings = {"lr": 0.05, "weight_decay": 0.01}
    optimizer = ShardedOptimizer(wrapped.parameters(), torch.optim.SGD, **settings)
    train(device, wrapped, module, optimizer)

    adam = ShardedOptimizer(module.parameters(), torch.optim.AdamW)
    adam.step()
    state = adam.state_dict()
    assert len(state["state"]) == len(list(module.parameters()))
    assert {t.device.type for s in state["state"].values() for t in s.values()} == {"cpu"}
    adam.load_state_dict(state)
    adam.step()


@every_machine
def test_the_sharded_optimizer_follows_one_process(
    ranks: RankPool, backend: str, device: str, world_size: int
) -> None:
    ranks.run(train_sharded, world_size, backend=backend, device=device)


def train_in_bf16(device: str, model: str) -> tuple[float, float]:
    module = build(model, seed=0).to(device)
    ours = FSDP(module, torch.bfloat16)
    optimizer = torch.optim.AdamW(ours.parameters(), lr=0.01)
    losses = []
    for _ in range(10):
        optimizer.zero_grad()
        loss = ours(own_part(batch_of(0, 0)).to(device)).square().mean()
        loss.backward()
        ours.finish_gradient_synchronization()
        optimizer.step()
        losses.append(loss.item())
    return losses[0], losses[-1]


@every_machine
@pytest.mark.parametrize("model", ["torch's layers", "blocks"])
def test_fsdp_learns_in_bf16(
    ranks: RankPool, model: str, backend: str, device: str, world_size: int
) -> None:
    for first, last in ranks.run(
        train_in_bf16, world_size, backend=backend, device=device, model=model
    ):
        assert last < 0.9 * first


def gpu_memory_after_forward(device: str, a_block: int) -> tuple[float, float]:
    """In weights: what a forward has left behind, and its highest."""
    width, number = 1024, 16
    blocks = [
        nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(a_block)])
        for _ in range(number // a_block)
    ]
    ours = FSDP(nn.Sequential(*blocks).to(device), prefetch=1, blocks=lambda _: blocks)
    x = torch.randn(1, width, device=device)
    for _ in range(2):
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        output = ours(x)
        torch.cuda.synchronize()
        left = torch.cuda.memory_allocated() - before
        highest = torch.cuda.max_memory_allocated() - before
        output.sum().backward()
        ours.finish_gradient_synchronization()
        for parameter in ours.parameters():
            parameter.grad = None
    return left / (4 * width**2), highest / (4 * width**2)


@pytest.mark.gpu
@pytest.mark.skipif(GPUS == 0, reason="needs a CUDA GPU")
@pytest.mark.parametrize("a_block", [1, 2], ids=lambda n: f"{n} a message")
def test_whole_weights_come_and_go_on_a_gpu(ranks: RankPool, a_block: int) -> None:
    # The last block stays for backward; in use are one and what is arriving.
    for left, highest in ranks.run(gpu_memory_after_forward, 2, device="cuda:0", a_block=a_block):
        assert left < a_block + 0.5
        assert highest < 6 * a_block
