"""Which matrices FSDP communicates together, in which order, and what is in memory."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lmlab.parallel import FSDP
from lmlab.parallel.fsdp_scheduler import ExecutionOrder
from tests.parallel import training
from tests.parallel.launcher import on_ranks
from tests.parallel.models import build
from tests.parallel.training import Message, backward, batch_of, own_part, recorded_messages


def pair() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))


def module(**children: nn.Module | nn.Parameter) -> nn.Module:
    parent = nn.Module()
    for name, child in children.items():
        setattr(parent, name, child)
    return parent


def two_pairs() -> nn.ModuleList:
    return nn.ModuleList(pair() for _ in range(2))


def experts() -> nn.ModuleList:
    """Matrices and a list of modules: blocks within a block."""
    linears = {"router": nn.Linear(3, 2), "out": nn.Linear(3, 3)}
    return nn.ModuleList([module(**linears, experts=two_pairs())])


def two_matrices() -> nn.ModuleList:
    weights = {name: nn.Parameter(torch.randn(3, 3)) for name in ("weight", "other")}
    return nn.ModuleList([module(**weights)])


def shared_layer() -> nn.ModuleList:
    blocks = two_pairs()
    blocks[1][0] = blocks[0][0]
    return blocks


def tied_weight() -> nn.ModuleList:
    blocks = nn.ModuleList(nn.Sequential(*pair(), nn.Linear(3, 3)) for _ in range(2))
    blocks[1][0].weight = blocks[0][0].weight
    return blocks


def partly_frozen() -> nn.ModuleList:
    block = nn.Sequential(*pair(), *pair())
    block[0].requires_grad_(False)
    block[2].requires_grad_(False)
    return nn.ModuleList([block])


def both_in(name: str) -> str:
    return f"{name}: {name}.0 {name}.1"


# For each model its groups: the name and the layers of each.
MODULES: list[tuple[Callable[[], nn.Module], str]] = [
    (pair, "0.weight: 0 | 1.weight: 1"),
    (two_pairs, "0: 0.0 0.1 | 1: 1.0 1.1"),
    (lambda: nn.ModuleList(pair()), "0.weight: 0 | 1.weight: 1"),
    (experts, f"0: 0.router 0.out | {both_in('0.experts.0')} | {both_in('0.experts.1')}"),
    (
        lambda: nn.ModuleList([nn.ModuleDict({"a": pair(), "b": pair()})]),
        f"{both_in('0.a')} | {both_in('0.b')}",
    ),
    (shared_layer, "0.0.weight: 0.0 | 0.1.weight: 0.1 | 1.1.weight: 1.1"),
    (tied_weight, "0.0.weight: 0.0 | 0: 0.1 0.2 | 1: 1.1 1.2"),
    (partly_frozen, "0 from 0.0.weight: 0.0 0.2 | 0 from 0.1.weight: 0.1 0.3"),
    (
        lambda: nn.ModuleList([nn.Sequential(*pair(), *pair().double())]),
        "0 from 0.0.weight: 0.0 0.1 | 0 from 0.2.weight: 0.2 0.3",
    ),
    (two_matrices, "0: 0 0.other"),
]


def groups_of(module: nn.Module, **options: Any) -> str:
    layers_of = {
        group.name: " ".join(param.name.removesuffix(".weight") for param in group.params)
        for group in FSDP(module, **options).groups
    }
    return " | ".join(f"{name}: {layers}" for name, layers in layers_of.items())


@on_ranks(2)
def test_the_matrices_in_one_member_of_a_list_form_a_group() -> None:
    for make, expected in MODULES:
        assert groups_of(make()) == expected
    alone = " | ".join(f"{name}.weight: {name}" for name in ("0.0", "0.1", "1.0", "1.1"))
    assert groups_of(two_pairs(), blocks=lambda model: []) == alone
    assert groups_of(two_pairs(), blocks=lambda model: [model]) == "model: 0.0 0.1 1.0 1.1"


class Chain(nn.Module):
    """Blocks of two layers, possibly recomputed, whose sizes differ: a message identifies one."""

    def __init__(self, checkpointed: bool) -> None:
        super().__init__()
        self.checkpointed = checkpointed
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.Linear(2 * width, width + 1))
            for width in range(4, 8)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return x


def log_of_second_step(checkpointed: bool = False) -> list[str]:
    """Messages of each block, and when blocks compute."""
    chain = Chain(checkpointed)
    wrapped = FSDP(chain)
    sizes = [sum(param.padded.numel() for param in group.params) for group in wrapped.groups]
    with recorded_messages() as log:
        for number, block in enumerate(chain.blocks):
            block[0].register_forward_pre_hook(lambda _m, _i, n=number: log.append(f"block {n}"))
        for _ in range(2):
            log.clear()
            output = wrapped(torch.randn(2, 4, requires_grad=True))
            log.append("backward")
            output.sum().backward()
            log.append("finish")
            wrapped.finish_gradient_synchronization()
    short = {"all-gather": "gather", "reduce-scatter": "reduce"}
    return [
        f"{short[entry.kind]} {sizes.index(entry.numel)}" if isinstance(entry, Message) else entry
        for entry in log
        if not isinstance(entry, Message) or entry.kind in short
    ]


PREFETCHING = """
gather 0, gather 1, block 0, gather 2, block 1, gather 3, block 2, block 3, backward,
gather 2, reduce 3, gather 1, reduce 2, gather 0, reduce 1, reduce 0, finish"""


@on_ranks(3)
def test_the_next_block_is_gathered_before_a_block_computes() -> None:
    assert ", ".join(log_of_second_step()) == PREFETCHING.strip().replace("\n", " ")


@on_ranks(2)
def test_a_recomputed_block_is_gathered_once_in_backward() -> None:
    log = log_of_second_step(checkpointed=True)
    after = sorted(log[log.index("backward") + 1 : log.index("finish")])
    recomputed = [f"block {number}" for number in range(4)]
    reductions = [f"reduce {number}" for number in range(4)]
    assert after == [*recomputed, "gather 0", "gather 1", "gather 2", *reductions]


@pytest.mark.parametrize(("model", "groups"), [("transformer", 3), ("layers", 3), ("blocks", 5)])
@on_ranks(2, 3)
def test_a_step_gathers_each_group_twice_and_reduces_it_once(model: str, groups: int) -> None:
    wrapped = FSDP(build(model))
    with recorded_messages() as log:
        for step in range(3):
            backward(wrapped, own_part(batch_of(step)))
    assert len(wrapped.groups) == groups
    assert all(message.is_async for message in log)
    # From the second step on, the group that ends forward stays gathered for backward.
    expected = {"all-gather": 2 * 3 * groups - 2, "reduce-scatter": 3 * groups, "all-reduce": 3}
    assert Counter(message.kind for message in log) == expected
    replicated = sum(p.numel() + 1 for b in wrapped.replicated_buckets for p in b.parameters)
    assert {m.numel for m in log if m.kind == "all-reduce"} == {replicated}
    with recorded_messages() as log, torch.no_grad():
        wrapped(own_part(batch_of(3)))
    assert [message.kind for message in log] == ["all-gather"] * groups
    sizes = [sum(param.padded.numel() for param in group.params) for group in wrapped.groups]
    assert [message.numel for message in log] == sizes


@on_ranks(2)
def test_the_reduction_of_a_single_group_is_in_flight_after_every_backward() -> None:
    wrapped = FSDP(nn.Linear(3, 4))
    for last_of_step in (True, False, True):
        wrapped(torch.randn(2, 3)).sum().backward()
        assert wrapped.groups[0]._reducing is not None
        if last_of_step:
            wrapped.finish_gradient_synchronization()


@pytest.mark.parametrize(("model", "reductions"), [("tied", 2), ("unused_layer", 3)])
@on_ranks(2)
def test_tied_weights_are_gathered_twice_unused_ones_never(model: str, reductions: int) -> None:
    wrapped = FSDP(build(model))
    with recorded_messages() as log:
        backward(wrapped, own_part(batch_of(0)))
    expected = {"all-gather": 2 * 3, "reduce-scatter": reductions, "all-reduce": 1}
    assert Counter(message.kind for message in log) == expected


def full_weights_in_memory(
    compute_dtype: torch.dtype | None, checkpointed: bool, frozen: bool
) -> dict[str, int]:
    """Groups with memory for full weights or gradients, at most, during and after forward."""
    chain = Chain(checkpointed)
    if frozen:
        chain.requires_grad_(False)
        chain.blocks[0].requires_grad_(True)  # so that backward goes through all blocks
    wrapped = FSDP(chain, compute_dtype)
    found: dict[str, int] = {}
    phase = "forward"

    def sample(*_: Any) -> None:
        allocated = sum(any(p.allocated for p in group.params) for group in wrapped.groups)
        gradients = sum(bool(group.with_gradient) for group in wrapped.groups)
        for key, number in ((phase, allocated), (f"gradients in {phase}", gradients)):
            found[key] = max(found.get(key, 0), number)

    for layer in chain.modules():
        if isinstance(layer, nn.Linear):
            layer.register_forward_hook(sample, prepend=True)
    weights = {param.padded.untyped_storage()._cdata for param in wrapped.sharded_params}
    shapes = {param.shape for param in wrapped.sharded_params}

    def is_gathered_weight(tensor: Tensor) -> Tensor:
        if {tensor.shape, tensor.mT.shape if tensor.ndim == 2 else tensor.shape} & shapes:
            assert tensor.untyped_storage()._cdata in weights, "autograd saved a copy of a weight"
        return tensor

    for _ in range(2):  # the second step knows the order
        training.clear_gradients(wrapped)
        found.clear()
        phase = "forward"
        with torch.autograd.graph.saved_tensors_hooks(is_gathered_weight, lambda tensor: tensor):
            output = wrapped(torch.randn(3, 4, requires_grad=True))
        found["after forward"] = sum(group.gathered for group in wrapped.groups)
        phase = "backward"
        output.register_hook(sample)
        for param in wrapped.sharded_params:
            if param.full.requires_grad:
                param.full.register_hook(sample)
        output.sum().backward()
        wrapped.finish_gradient_synchronization()
        found["after backward"] = sum(group.gathered for group in wrapped.groups)
    return found


@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
@pytest.mark.parametrize("checkpointed", [False, True], ids=["saved", "recomputed"])
@pytest.mark.parametrize("compute_dtype", [None, torch.bfloat16], ids=["fp32", "bf16"])
@on_ranks(2)
def test_full_weights(compute_dtype: torch.dtype | None, checkpointed: bool, frozen: bool) -> None:
    found = full_weights_in_memory(compute_dtype, checkpointed, frozen)
    assert found["forward"] <= 2  # in use, prefetched
    assert found["after forward"] == 1  # the last one, with which backward begins
    assert found["backward"] <= 3  # in use, prefetched, about to be freed
    assert found["gradients in backward"] <= 1
    assert found["after backward"] == 0


def after_forward(groups: list[int]) -> ExecutionOrder:
    order = ExecutionOrder()
    order.begin_forward()
    for group in groups:
        order.forward(group)
    return order


FOUR = [0, 1, 2, 3]
# The last forward, what is run next and what is predicted after each group.
PREDICTIONS: dict[str, tuple[list[int], str, list[int], list[list[int]]]] = {
    "first forward": ([], "forward", [0, 1, 2], [[], [], []]),
    "same forward": (FOUR, "forward", FOUR, [[1], [2], [3], []]),
    "used twice": ([0, 1, 0], "forward", [0, 1, 0], [[1], [0], []]),
    "deviates": ([0, 1, 2], "forward", [0, 2, 1], [[1], [], []]),
    "reversed": (FOUR, "backward", FOUR[::-1], [[2], [1], [0], []]),
    "skips and restarts": (FOUR, "backward", [3, 1, 3, 7], [[2], [0], [2], []]),
    "several outputs": ([0, 1, 0], "backward", [0, 0, 1, 1, 0], [[1], [1], [0], [0], []]),
}


@pytest.mark.parametrize("case", PREDICTIONS)
def test_a_forward_predicts_the_next_one_and_backward(case: str) -> None:
    before, direction, groups, predicted = PREDICTIONS[case]
    order = after_forward(before)
    if direction == "forward":
        order.begin_forward()
        order.begin_forward()  # a forward without groups is ignored
    assert [getattr(order, direction)(group) for group in groups] == predicted


def test_recomputation_runs_up_to_where_backward_is() -> None:
    order = after_forward([0, 1, 2, 3, 4, 5])
    order.backward(5)
    order.backward(4)
    assert [order.recomputed(group) for group in (2, 3, 4, 9)] == [[3], [4], [], []]
