"""Which matrices FSDP communicates together, what it sends in a step, and what is in memory."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lmlab.parallel import FSDP
from lmlab.parallel.fsdp_blocks import Blocks, module_list_members, no_blocks
from tests.parallel.launcher import RankPool
from tests.parallel.models import build
from tests.parallel.recording import Message, recorded_messages
from tests.parallel.training import backward, batch_of, clear_gradients, every_world, own_part


def pair() -> nn.Sequential:
    """Two matrices that are not in a list."""
    return nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))


class TwoMatrices(nn.Module):
    """One layer with two matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.other = (nn.Parameter(torch.randn(3, 3)) for _ in range(2))


class Experts(nn.Module):
    """Matrices and a list of modules: blocks within a block."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.out = nn.Linear(3, 2), nn.Linear(3, 3)
        self.experts = nn.ModuleList(pair() for _ in range(2))


def shared_layer() -> nn.ModuleList:
    blocks = nn.ModuleList(pair() for _ in range(2))
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


MODULES: dict[str, tuple[Any, dict[str, str]]] = {
    "no_list": (pair, {"0.weight": "0", "1.weight": "1"}),
    "list": (
        lambda: nn.ModuleList(pair() for _ in range(2)),
        {"0": "0.0 0.1", "1": "1.0 1.1"},
    ),
    "list_of_layers": (lambda: nn.ModuleList(pair()), {"0.weight": "0", "1.weight": "1"}),
    "nested_lists": (
        lambda: nn.ModuleList([Experts()]),
        {
            "0": "0.router 0.out",
            "0.experts.0": "0.experts.0.0 0.experts.0.1",
            "0.experts.1": "0.experts.1.0 0.experts.1.1",
        },
    ),
    "dict_in_list": (
        lambda: nn.ModuleList([nn.ModuleDict({"a": pair(), "b": pair()})]),
        {"0.a": "0.a.0 0.a.1", "0.b": "0.b.0 0.b.1"},
    ),
    "shared_layer": (
        shared_layer,
        {"0.0.weight": "0.0", "0.1.weight": "0.1", "1.1.weight": "1.1"},
    ),
    "tied_weight": (tied_weight, {"0.0.weight": "0.0", "0": "0.1 0.2", "1": "1.1 1.2"}),
    "partly_frozen": (
        partly_frozen,
        {"0 from 0.0.weight": "0.0 0.2", "0 from 0.1.weight": "0.1 0.3"},
    ),
    "two_dtypes": (
        lambda: nn.ModuleList([nn.Sequential(*pair(), *pair().double())]),
        {"0 from 0.0.weight": "0.0 0.1", "0 from 0.2.weight": "0.2 0.3"},
    ),
    "two_matrices_per_layer": (lambda: nn.ModuleList([TwoMatrices()]), {"0": "0 0.other"}),
}


def groups_of(module: nn.Module, blocks: Blocks = module_list_members) -> dict[str, str]:
    groups = FSDP(module, blocks=blocks).groups
    return {g.name: " ".join(p.name.removesuffix(".weight") for p in g.params) for g in groups}


def check_groups() -> None:
    for name, (make, expected) in MODULES.items():
        assert groups_of(make()) == expected, name
    module = MODULES["list"][0]()
    alone = {f"{name}.weight": name for name in ("0.0", "0.1", "1.0", "1.1")}
    assert groups_of(module, no_blocks) == alone
    together = {"model": "0.0 0.1 1.0 1.1"}
    assert groups_of(MODULES["list"][0](), lambda model: [model]) == together


def test_the_matrices_in_one_member_of_a_list_form_a_group(ranks: RankPool) -> None:
    ranks.run(check_groups, 2)


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


def log_of_second_step(prefetch: int, checkpointed: bool = False) -> list[str]:
    """Messages of each block, and when blocks compute."""
    chain = Chain(checkpointed)
    wrapped = FSDP(chain, prefetch=prefetch)
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
ON_DEMAND = """
gather 0, block 0, gather 1, block 1, gather 2, block 2, gather 3, block 3, backward,
reduce 3, gather 2, reduce 2, gather 1, reduce 1, gather 0, reduce 0, finish"""


@pytest.mark.parametrize(("prefetch", "expected"), [(1, PREFETCHING), (0, ON_DEMAND)])
def test_the_next_block_is_gathered_before_a_block_computes(
    ranks: RankPool, prefetch: int, expected: str
) -> None:
    for log in ranks.run(log_of_second_step, 3, prefetch=prefetch):
        assert ", ".join(log) == expected.strip().replace("\n", " ")


def test_a_recomputed_block_is_gathered_once_in_backward(ranks: RankPool) -> None:
    log = ranks.run(log_of_second_step, 2, prefetch=1, checkpointed=True)[0]
    after = log[log.index("backward") :]
    gathers = Counter(entry for entry in after if entry.startswith("gather"))
    assert gathers == {f"gather {number}": 1 for number in range(3)}
    reductions = [entry for entry in after if entry.startswith("reduce")]
    assert reductions == [f"reduce {number}" for number in (3, 2, 1, 0)]


def messages_of_steps(model: str, steps: int) -> tuple[Counter[str], int]:
    wrapped = FSDP(build(model))
    with recorded_messages() as log:
        for step in range(steps):
            backward(wrapped, own_part(batch_of(step)))
    assert all(message.is_async for message in log)
    buckets = wrapped.replicated_buckets
    replicated = sum(p.numel() + 1 for bucket in buckets for p in bucket.parameters)
    assert {m.numel for m in log if m.kind == "all-reduce"} == {replicated}
    return Counter(message.kind for message in log), len(wrapped.groups)


@pytest.mark.parametrize(("model", "groups"), [("transformer", 3), ("layers", 3), ("blocks", 5)])
@every_world
def test_a_step_gathers_each_group_twice_and_reduces_it_once(
    ranks: RankPool, model: str, groups: int, world_size: int
) -> None:
    count, found = ranks.run(messages_of_steps, world_size, model=model, steps=3)[0]
    assert found == groups
    # From the second step on, the group that ends forward stays gathered for backward.
    gathers = 2 * 3 * groups - 2
    assert count == {"all-gather": gathers, "reduce-scatter": 3 * groups, "all-reduce": 3}


@pytest.mark.parametrize(("model", "reductions"), [("tied", 2), ("unused_layer", 3)])
def test_a_tied_weight_is_gathered_at_each_use_and_an_unused_one_never(
    ranks: RankPool, model: str, reductions: int
) -> None:
    count, _ = ranks.run(messages_of_steps, 2, model=model, steps=1)[0]
    assert count == {"all-gather": 2 * 3, "reduce-scatter": reductions, "all-reduce": 1}


def traffic_without_padding() -> tuple[Counter[str], Counter[str]]:
    wrapped = FSDP(nn.Sequential(*[nn.Linear(6, 6, bias=False) for _ in range(3)]))
    traffic: Counter[str] = Counter()
    with recorded_messages() as log:
        wrapped(torch.randn(2, 6)).sum().backward()
        wrapped.finish_gradient_synchronization()
        for message in log:
            traffic[message.kind] += message.numel
        log.clear()
        with torch.no_grad():
            wrapped(torch.randn(2, 6))
    return traffic, Counter(message.kind for message in log)


def test_traffic_of_a_step_and_of_an_evaluation(ranks: RankPool) -> None:
    traffic, evaluation = ranks.run(traffic_without_padding, 3)[0]
    assert traffic == {"all-gather": 2 * 3 * 36, "reduce-scatter": 3 * 36}
    assert evaluation == {"all-gather": 3}


def full_weights_in_memory(options: dict[str, Any]) -> dict[str, int]:
    """Groups with memory for full weights or gradients, at most, during and after forward."""
    chain = Chain(options.pop("checkpointed"))
    if options.pop("frozen"):
        chain.requires_grad_(False)
        chain.blocks[0].requires_grad_(True)  # so that backward goes through all blocks
    wrapped = FSDP(chain, **options)
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
        clear_gradients(wrapped)
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
def test_full_weights_are_in_memory_one_or_two_groups_at_a_time(
    ranks: RankPool, compute_dtype: torch.dtype | None, checkpointed: bool, frozen: bool
) -> None:
    options = {"compute_dtype": compute_dtype, "checkpointed": checkpointed, "frozen": frozen}
    for found in ranks.run(full_weights_in_memory, 2, options=options):
        assert found["forward"] <= 2
        assert found["after forward"] == 1
        assert found["backward"] <= 3
        assert found["gradients in backward"] <= 1
        assert found["after backward"] == 0
