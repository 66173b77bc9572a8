"""Every scheme computes what one process computes, also in unusual steps and on any device."""

import copy
import gc
import weakref
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lmlab.parallel import FSDP, FlatDDP, ShardedOptimizer
from tests.parallel import training
from tests.parallel.launcher import LARGEST_WORLD, RankPool, on_ranks
from tests.parallel.models import MODELS, Model, build
from tests.parallel.test_fsdp import train_in
from tests.parallel.training import SCHEMES, backward, batch_of, every_scheme, own_part, train_both


@every_scheme
@pytest.mark.parametrize("model", MODELS)
@on_ranks(2, 3)
def test_training_follows_one_process(scheme: str, model: str) -> None:
    wrapped, alone = training.wrapped_and_alone(scheme, model)
    train_both(wrapped, alone, map(batch_of, range(training.STEPS)))


@every_scheme
@on_ranks(2)
def test_two_ranks_are_bitwise_one_process_where_sums_allow_it(scheme: str) -> None:
    wrapped, alone = training.wrapped_and_alone(scheme, "exact")
    train_both(wrapped, alone, [batch_of(step, 1) for step in range(10)], tolerance=0.0)


@every_scheme
@on_ranks(3)
def test_gradients_accumulate(scheme: str) -> None:
    for model in ("unused_layer", "tied", "blocks"):
        wrapped, alone = training.wrapped_and_alone(scheme, model)
        for step in range(2):  # nothing of the first step is left in the second
            training.clear_gradients(wrapped, alone)
            for number in range(3):
                batch = batch_of(10 * step + number)
                training.loss_of(wrapped(own_part(batch))).backward()
                training.loss_of(alone(batch)).backward()
            wrapped.finish_gradient_synchronization()
            training.assert_gradients_near(wrapped, alone)


@every_scheme
@on_ranks(3)
def test_several_graphs_may_exist_and_be_used_twice(scheme: str) -> None:
    for model in ("unused_layer", "tied", "blocks"):
        wrapped, alone = training.wrapped_and_alone(scheme, model)
        batches = [batch_of(number) for number in range(2)]
        losses = [training.loss_of(wrapped(own_part(batch))) for batch in batches]
        for loss, batch in zip(losses * 2, batches * 2, strict=True):
            loss.backward(retain_graph=True)
            training.loss_of(alone(batch)).backward()
        wrapped.finish_gradient_synchronization()
        training.assert_gradients_near(wrapped, alone)


@training.every_ddp
@on_ranks(3)
def test_a_missing_gradient_counts_as_zeros_unless_no_rank_has_one(scheme: str) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    alone = Model(  # rank r uses branches r and 3, no rank uses branch 4
        lambda m, x: x + m.branches[int(x[0, 0])](m.stem(x)) + m.branches[3](m.stem(x)),
        stem=nn.Linear(3, 3),
        branches=nn.ModuleList(nn.Linear(3, 3) for _ in range(5)),
    )
    wrapped = SCHEMES[scheme](copy.deepcopy(alone))
    x = torch.randn(world_size, 2, 3)
    x[:, 0, 0] = torch.arange(world_size)
    for _ in range(2):
        training.clear_gradients(wrapped)
        wrapped(x[rank]).square().mean().backward()
        wrapped.finish_gradient_synchronization()
    for other in range(world_size):
        (alone(x[other]).square().mean() / world_size).backward()
    assert alone.branches[4].weight.grad is None
    training.assert_gradients_near(wrapped, alone)


@pytest.mark.parametrize(
    ("model", "layer"), [("layers", "inner"), ("blocks", "blocks.1"), ("blocks", "blocks.1.up")]
)
@every_scheme
@on_ranks(2)
def test_a_failed_backward_leaves_nothing_behind(scheme: str, model: str, layer: str) -> None:
    wrapped, alone = training.wrapped_and_alone(scheme, model)
    fail = Mock(side_effect=ArithmeticError("in the middle of backward"))
    handle = wrapped.module.get_submodule(layer).register_forward_hook(
        lambda _module, _args, output: output.register_hook(fail) and None
    )
    with pytest.raises(ArithmeticError):
        training.loss_of(wrapped(own_part(batch_of(0)))).backward()
    handle.remove()
    wrapped.finish_gradient_synchronization()
    train_both(wrapped, alone, [batch_of(1)])


@every_scheme
@on_ranks(2)
def test_a_model_without_trainable_parameters(scheme: str) -> None:
    wrapped = SCHEMES[scheme](build("layers").requires_grad_(False))
    wrapped(own_part(batch_of(0)))
    wrapped.finish_gradient_synchronization()


def with_buffers(content: float) -> Model:
    """One parameter, not contiguous, and buffers of several kinds."""
    buffers = [torch.tensor(content), torch.tensor([int(content)]), torch.tensor([content > 0])]
    named = {f"buffer_{number}": buffer for number, buffer in enumerate(buffers)}
    weight = nn.Parameter(torch.full((2, 3), content).t())
    model = Model(lambda m, x: x, weight=weight, empty=torch.empty(0), **named)
    model.register_buffer("table", torch.full((3,), content), persistent=False)
    return model


@every_scheme
@on_ranks(3)
def test_parameters_and_buffers_start_as_those_of_rank_0(scheme: str) -> None:
    of_rank_0 = with_buffers(1.0)
    wrapped = SCHEMES[scheme](with_buffers(float(1 - dist.get_rank())))
    values = [*training.full_parameters(wrapped).values(), *wrapped.buffers()]
    assert all(map(torch.equal, values, [of_rank_0.weight, *of_rank_0.buffers()]))


def save(scheme: str, model: str) -> dict[str, Tensor]:
    state: dict[str, Tensor] = SCHEMES[scheme](build(model, seed=3)).state_dict()
    return state


def load(scheme: str, model: str, state: dict[str, Tensor]) -> dict[str, Tensor]:
    wrapped = SCHEMES[scheme](build(model, seed=4))
    wrapped.load_state_dict(state)
    backward(wrapped, own_part(batch_of(0)))
    return training.full_parameters(wrapped)


@pytest.mark.parametrize("model", ["layers", "tied"])
@every_scheme
def test_a_state_dict_loads_at_another_world_size(ranks: RankPool, scheme: str, model: str) -> None:
    expected = build(model, seed=3)
    for state in ranks.run(save, 2, scheme=scheme, model=model):
        assert state.keys() == expected.state_dict().keys()
        assert all(torch.equal(state[name], t) for name, t in expected.state_dict().items())
    for loaded in ranks.run(load, 3, scheme=scheme, model=model, state=state):
        assert list(loaded) == [name for name, _ in expected.named_parameters()]
        assert all(torch.equal(loaded[name], p) for name, p in expected.named_parameters())


@every_scheme
@on_ranks(2)
def test_a_dropped_wrapper_is_freed_without_the_garbage_collector(scheme: str) -> None:
    module = build("blocks")
    gc.collect()
    gc.disable()
    wrapped = SCHEMES[scheme](module)
    backward(wrapped, own_part(batch_of(0)))
    references = [weakref.ref(wrapped), weakref.ref(module)]
    del wrapped, module
    gc.enable()
    assert [reference() for reference in references] == [None, None]


# A GPU may sum in another order than one process.
TOLERANCE = 1e-5
GPUS = torch.cuda.device_count()


def train(device: str) -> None:
    batches = [batch_of(step).to(device) for step in range(5)]
    for wrap in SCHEMES.values():
        wrapped, alone = wrap(build("blocks").to(device)), build("blocks").to(device)
        train_both(wrapped, alone, batches, TOLERANCE)
    wrapped, alone = FlatDDP(build("layers").to(device)), build("layers").to(device)
    sharded = ShardedOptimizer(wrapped.parameters(), torch.optim.SGD, **training.SGD_SETTINGS)
    train_both(wrapped, alone, batches, TOLERANCE, sharded)
    adam = ShardedOptimizer(wrapped.parameters(), torch.optim.AdamW)
    adam.step()
    state = adam.state_dict()
    assert len(state["state"]) == len(list(wrapped.parameters()))
    assert {t.device.type for s in state["state"].values() for t in s.values()} == {"cpu"}
    adam.load_state_dict(state)
    adam.step()
    train_in(torch.bfloat16, device)


@pytest.mark.parametrize(
    ("backend", "device", "world_size"),
    [
        ("gloo", "cpu", 2),
        pytest.param("gloo", "cuda:0", 2, marks=pytest.mark.gpu),
        pytest.param("nccl", "cuda", min(GPUS, LARGEST_WORLD), marks=pytest.mark.gpu),
    ],
)
def test_training_on_a_backend(ranks: RankPool, backend: str, device: str, world_size: int) -> None:
    ranks.run(train, world_size, backend=backend, device=device)


def gpu_memory_of_forward(device: str, block_size: int) -> tuple[float, float]:
    """Memory left by a forward and its peak, in units of one weight."""
    width, number = 1024, 16
    blocks = [
        nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(block_size)])
        for _ in range(number // block_size)
    ]
    wrapped = FSDP(nn.Sequential(*blocks).to(device), blocks=lambda _: blocks)
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
@pytest.mark.parametrize("block_size", [1, 2])
def test_full_weights_come_and_go_on_a_gpu(ranks: RankPool, block_size: int) -> None:
    for left, peak in ranks.run(gpu_memory_of_forward, 2, device="cuda:0", block_size=block_size):
        assert left < block_size + 0.5  # the last block stays for backward
        assert peak < 6 * block_size
