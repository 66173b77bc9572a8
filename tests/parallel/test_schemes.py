"""Every scheme computes what one process computes on all samples, also in unusual steps."""

import copy
import gc
import weakref
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.parallel.launcher import RankPool, on_ranks
from tests.parallel.models import MODELS, build
from tests.parallel.training import (
    DDP,
    SCHEMES,
    STEPS,
    assert_gradients_near,
    backward,
    batch_of,
    clear_gradients,
    every_ddp,
    every_scheme,
    full_parameters,
    loss_of,
    own_part,
    train_both,
    wrapped_and_alone,
)


@every_scheme
@pytest.mark.parametrize("model", MODELS)
@on_ranks(2, 3)
def test_training_follows_one_process(scheme: str, model: str) -> None:
    wrapped, alone = wrapped_and_alone(scheme, model)
    train_both(wrapped, alone, map(batch_of, range(STEPS)))


@every_scheme
@on_ranks(2)
def test_two_ranks_are_bitwise_one_process_where_sums_allow_it(scheme: str) -> None:
    wrapped, alone = wrapped_and_alone(scheme, "exact")
    train_both(wrapped, alone, [batch_of(step, 1) for step in range(10)], tolerance=0.0)


@pytest.mark.parametrize(
    ("scheme", "synchronized"),
    [(scheme, "+++") for scheme in SCHEMES]
    + [(scheme, marks) for scheme in DDP for marks in ("--+", "---", "+--")],
)
@on_ranks(3)
def test_gradients_accumulate(scheme: str, synchronized: str) -> None:
    """Over three batches, of which those marked + are synchronized in backward."""
    for model in ("unused_layer", "tied", "blocks"):
        wrapped, alone = wrapped_and_alone(scheme, model)
        for step in range(2):  # nothing of the first step is left in the second
            clear_gradients(wrapped, alone)
            for number, mark in enumerate(synchronized):
                batch = batch_of(10 * step + number)
                with nullcontext() if mark == "+" else wrapped.no_sync():
                    loss_of(wrapped(own_part(batch))).backward()
                loss_of(alone(batch)).backward()
            wrapped.finish_gradient_synchronization()
            assert_gradients_near(wrapped, alone)


@every_scheme
@on_ranks(3)
def test_several_graphs_may_exist_and_be_used_twice(scheme: str) -> None:
    for model in ("unused_layer", "tied", "blocks"):
        wrapped, alone = wrapped_and_alone(scheme, model)
        batches = [batch_of(number) for number in range(2)]
        losses = [loss_of(wrapped(own_part(batch))) for batch in batches]
        for loss, batch in zip(losses * 2, batches * 2, strict=True):
            loss.backward(retain_graph=True)
            loss_of(alone(batch)).backward()
        wrapped.finish_gradient_synchronization()
        assert_gradients_near(wrapped, alone)


class Branches(nn.Module):
    """A step uses the given branches."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.stem = nn.Linear(3, 3)
        self.branches = nn.ModuleList(nn.Linear(3, 3) for _ in range(number))

    def forward(self, x: Tensor, used: list[int]) -> Tensor:
        x = self.stem(x)
        return sum((self.branches[i](x) for i in used), start=x)


@every_ddp
@on_ranks(3)
def test_a_missing_gradient_counts_as_zeros_unless_no_rank_has_one(scheme: str) -> None:
    alone = Branches(number=5)
    wrapped = SCHEMES[scheme](copy.deepcopy(alone))
    rank, world_size = dist.get_rank(), dist.get_world_size()
    x = torch.randn(world_size, 2, 3)
    used_by = [[rank, 3] for rank in range(world_size)]  # no rank uses branch 4
    for _ in range(2):
        clear_gradients(wrapped)
        wrapped(x[rank], used_by[rank]).square().mean().backward()
        wrapped.finish_gradient_synchronization()
    for other in range(world_size):
        (alone(x[other], used_by[other]).square().mean() / world_size).backward()
    assert alone.branches[4].weight.grad is None
    assert_gradients_near(wrapped, alone)


def fail(gradient: Tensor) -> None:
    raise ArithmeticError("in the middle of backward")


@pytest.mark.parametrize(
    ("model", "layer"), [("layers", "inner"), ("blocks", "blocks.1"), ("blocks", "blocks.1.up")]
)
@every_scheme
@on_ranks(2)
def test_a_failed_backward_leaves_nothing_behind(scheme: str, model: str, layer: str) -> None:
    wrapped, alone = wrapped_and_alone(scheme, model)
    handle = wrapped.module.get_submodule(layer).register_forward_hook(
        lambda _module, _args, output: output.register_hook(fail) and None
    )
    with pytest.raises(ArithmeticError):
        loss_of(wrapped(own_part(batch_of(0)))).backward()
    handle.remove()
    wrapped.finish_gradient_synchronization()
    train_both(wrapped, alone, [batch_of(1)])


@every_scheme
@on_ranks(2)
def test_a_model_without_trainable_parameters(scheme: str) -> None:
    wrapped = SCHEMES[scheme](build("layers").requires_grad_(False))
    wrapped(own_part(batch_of(0)))
    wrapped.finish_gradient_synchronization()


class Buffers(nn.Module):
    """One parameter and buffers of several kinds."""

    def __init__(self, content: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((2, 3), content).t())  # not contiguous
        self.register_buffer("number", torch.tensor(content))
        self.register_buffer("counter", torch.tensor([int(content)]))
        self.register_buffer("mask", torch.tensor([content > 0]))
        self.register_buffer("table", torch.full((3,), content), persistent=False)
        self.register_buffer("empty", torch.empty(0))


@every_scheme
@on_ranks(3)
def test_parameters_and_buffers_start_as_those_of_rank_0(scheme: str) -> None:
    wrapped, of_rank_0 = SCHEMES[scheme](Buffers(float(1 - dist.get_rank()))), Buffers(1.0)
    values = [*full_parameters(wrapped).values(), *wrapped.buffers()]
    assert all(map(torch.equal, values, [of_rank_0.weight, *of_rank_0.buffers()]))


def save(scheme: str, model: str) -> dict[str, Tensor]:
    state: dict[str, Tensor] = SCHEMES[scheme](build(model, seed=3)).state_dict()
    return state


def load(scheme: str, model: str, state: dict[str, Tensor]) -> dict[str, Tensor]:
    wrapped = SCHEMES[scheme](build(model, seed=4))
    wrapped.load_state_dict(state)
    backward(wrapped, own_part(batch_of(0)))
    return full_parameters(wrapped)


@pytest.mark.parametrize("model", ["layers", "tied"])
@every_scheme
def test_the_state_dict_is_the_modules_and_loads_at_another_world_size(
    ranks: RankPool, scheme: str, model: str
) -> None:
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
