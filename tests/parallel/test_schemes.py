"""Every scheme computes what one process computes on all samples, also in unusual steps."""

import copy
import gc
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.parallel.launcher import RankPool
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
    every_world,
    full_parameters,
    loss_of,
    own_part,
    train_both,
    wrapped_and_alone,
)


def train(scheme: str, model: str) -> None:
    wrapped, alone = wrapped_and_alone(scheme, model)
    train_both(wrapped, alone, map(batch_of, range(STEPS)))


@every_scheme
@pytest.mark.parametrize("model", MODELS)
@every_world  # closest to the function: varies slowest, so that groups are reused
def test_training_follows_one_process(
    ranks: RankPool, scheme: str, model: str, world_size: int
) -> None:
    ranks.run(train, world_size, scheme=scheme, model=model)


def train_on_one_sample_per_rank(scheme: str) -> None:
    wrapped, alone = wrapped_and_alone(scheme, "exact")
    train_both(wrapped, alone, [batch_of(step, 1) for step in range(10)], tolerance=0.0)


@every_scheme
def test_two_ranks_are_bitwise_one_process_where_sums_allow_it(
    ranks: RankPool, scheme: str
) -> None:
    ranks.run(train_on_one_sample_per_rank, 2, scheme=scheme)


NoSync = Callable[[], AbstractContextManager[Any]]


def all_but_last_unsynchronized(model: Any, batches: list[Tensor], no_sync: NoSync) -> None:
    with no_sync():
        several_backwards(model, batches[:-1], no_sync)
    several_backwards(model, batches[-1:], no_sync)


def all_unsynchronized(model: Any, batches: list[Tensor], no_sync: NoSync) -> None:
    with no_sync():
        several_backwards(model, batches, no_sync)


def all_but_first_unsynchronized(model: Any, batches: list[Tensor], no_sync: NoSync) -> None:
    several_backwards(model, batches[:1], no_sync)
    with no_sync():
        several_backwards(model, batches[1:], no_sync)


def several_backwards(model: Any, batches: list[Tensor], no_sync: NoSync) -> None:
    for batch in batches:
        loss_of(model(batch)).backward()


def forwards_before_backwards(model: Any, batches: list[Tensor], no_sync: NoSync) -> None:
    losses = [loss_of(model(batch)) for batch in batches]
    for loss in losses:
        loss.backward()


def one_graph_twice(model: Any, batches: list[Tensor], no_sync: NoSync) -> None:
    loss = loss_of(model(batches[0]))
    loss.backward(retain_graph=True)
    loss.backward()


WITH_NO_SYNC = [
    all_but_last_unsynchronized,
    all_unsynchronized,
    all_but_first_unsynchronized,
]
ACCUMULATIONS = [several_backwards, forwards_before_backwards, one_graph_twice]


def accumulate(scheme: str, how: Callable[..., None]) -> None:
    for model in ("unused_layer", "tied", "blocks"):
        wrapped, alone = wrapped_and_alone(scheme, model)
        for step in range(2):  # nothing of the first step is left in the second
            batches = [batch_of(10 * step + number) for number in range(3)]
            clear_gradients(wrapped, alone)
            no_sync = getattr(wrapped, "no_sync", nullcontext)
            how(wrapped, [own_part(batch) for batch in batches], no_sync)
            wrapped.finish_gradient_synchronization()
            how(alone, batches, nullcontext)
            assert_gradients_near(wrapped, alone)


@pytest.mark.parametrize(
    ("scheme", "how"),
    [(scheme, how) for scheme in SCHEMES for how in ACCUMULATIONS]
    + [(scheme, how) for scheme in DDP for how in WITH_NO_SYNC],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_gradients_accumulate(ranks: RankPool, scheme: str, how: Callable[..., None]) -> None:
    ranks.run(accumulate, 3, scheme=scheme, how=how)


class Branches(nn.Module):
    """A step uses the given branches."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.stem = nn.Linear(3, 3)
        self.branches = nn.ModuleList(nn.Linear(3, 3) for _ in range(number))

    def forward(self, x: Tensor, used: list[int]) -> Tensor:
        x = self.stem(x)
        return sum((self.branches[i](x) for i in used), start=x)


def use_different_branches(scheme: str) -> None:
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


@every_ddp
def test_a_missing_gradient_counts_as_zeros_unless_no_rank_has_one(
    ranks: RankPool, scheme: str
) -> None:
    ranks.run(use_different_branches, 3, scheme=scheme)


class Recomputed(nn.Module):
    """Two layers, the first of which is recomputed in backward."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        hidden = checkpoint(self.first, x.requires_grad_(), use_reentrant=self.reentrant)
        output: Tensor = self.second(torch.tanh(hidden))
        return output


def recompute(scheme: str) -> None:
    for reentrant in (True, False):
        alone = Recomputed(reentrant)
        wrapped = SCHEMES[scheme](copy.deepcopy(alone))
        train_both(wrapped, alone, [torch.randn(2 * dist.get_world_size(), 3) for _ in range(2)])


@every_scheme
def test_activation_checkpointing(ranks: RankPool, scheme: str) -> None:
    ranks.run(recompute, 2, scheme=scheme)


def fail_in_backward(scheme: str, model: str, layer: str) -> None:
    wrapped, alone = wrapped_and_alone(scheme, model)

    def fail(gradient: Tensor) -> None:
        raise ArithmeticError("in the middle of backward")

    handle = wrapped.module.get_submodule(layer).register_forward_hook(
        lambda _module, _args, output: output.register_hook(fail) and None
    )
    with pytest.raises(ArithmeticError):
        loss_of(wrapped(own_part(batch_of(0)))).backward()
    handle.remove()
    wrapped.finish_gradient_synchronization()
    train_both(wrapped, alone, [batch_of(1)])


@pytest.mark.parametrize(
    ("model", "layer"), [("layers", "inner"), ("blocks", "blocks.1"), ("blocks", "blocks.1.up")]
)
@every_scheme
def test_a_failed_backward_leaves_nothing_behind(
    ranks: RankPool, scheme: str, model: str, layer: str
) -> None:
    ranks.run(fail_in_backward, 2, scheme=scheme, model=model, layer=layer)


def wrap_frozen(scheme: str) -> None:
    wrapped = SCHEMES[scheme](build("layers").requires_grad_(False))
    wrapped(own_part(batch_of(0)))
    wrapped.finish_gradient_synchronization()


@every_scheme
def test_a_model_without_trainable_parameters(ranks: RankPool, scheme: str) -> None:
    ranks.run(wrap_frozen, 2, scheme=scheme)


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


def wrap_buffers(scheme: str) -> list[Any]:
    wrapped = SCHEMES[scheme](Buffers(content=float(1 - dist.get_rank())))
    values = [*full_parameters(wrapped).values(), *wrapped.buffers()]
    return [value.tolist() for value in values]


@every_scheme
def test_parameters_and_buffers_start_as_those_of_rank_0(ranks: RankPool, scheme: str) -> None:
    of_rank_0 = [t.tolist() for t in (Buffers(1.0).weight, *Buffers(1.0).buffers())]
    assert ranks.run(wrap_buffers, 3, scheme=scheme) == [of_rank_0] * 3


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


def wrap_and_drop(scheme: str) -> bool:
    """Whether a wrapper and its module are freed without the garbage collector."""
    module = build("blocks")
    gc.collect()
    gc.disable()
    wrapped = SCHEMES[scheme](module)
    backward(wrapped, own_part(batch_of(0)))
    references = [weakref.ref(wrapped), weakref.ref(module)]
    del wrapped, module
    gc.enable()
    return all(reference() is None for reference in references)


@every_scheme
def test_a_dropped_wrapper_is_freed_at_once(ranks: RankPool, scheme: str) -> None:
    assert all(ranks.run(wrap_and_drop, 2, scheme=scheme))
