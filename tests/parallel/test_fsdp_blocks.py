"""Which matrices FSDP sends together, and what happens when a block is used in part or past it."""

from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lmlab.parallel import FSDP
from lmlab.parallel.fsdp_blocks import Blocks, each_alone, members_of_lists
from tests.parallel.launcher import RankPool
from tests.parallel.models import Block, InBlocks, all_together, build
from tests.parallel.recording import recorded_messages
from tests.parallel.training import (
    assert_near,
    backward,
    batch_of,
    gradients,
    own_part,
    own_rows,
    parameters,
    sgd,
)

every_world = pytest.mark.parametrize("world_size", [2, 3], ids=lambda n: f"{n} ranks")


def pair() -> nn.Sequential:
    """Two matrices that are no list."""
    return nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))


class TwoMatrices(nn.Module):
    """One layer, two matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.other = (nn.Parameter(torch.randn(3, 3)) for _ in range(2))


class Experts(nn.Module):
    """A matrix and a list of modules: blocks in a block."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.out = nn.Linear(3, 2), nn.Linear(3, 3)
        self.experts = nn.ModuleList(pair() for _ in range(2))


def with_shared_layer() -> nn.ModuleList:
    """Two blocks, one layer of which is the same module."""
    blocks = nn.ModuleList(pair() for _ in range(2))
    blocks[1][0] = blocks[0][0]
    return blocks


def with_tied_weight() -> nn.ModuleList:
    """Two blocks, one layer of each of which has the same weight."""
    blocks = nn.ModuleList(nn.Sequential(*pair(), nn.Linear(3, 3)) for _ in range(2))
    blocks[1][0].weight = blocks[0][0].weight
    return blocks


def partly_frozen() -> nn.ModuleList:
    """A block of four, of which two are not trained."""
    block = nn.Sequential(*pair(), *pair())
    block[0].requires_grad_(False)
    block[2].requires_grad_(False)
    return nn.ModuleList([block])


def of_two_types() -> nn.ModuleList:
    """A block of four, two of each type."""
    return nn.ModuleList([nn.Sequential(*pair(), *pair().double())])


def dictionaries() -> nn.ModuleList:
    """A list of parts, none of which is called as a whole."""
    return nn.ModuleList(nn.ModuleDict({"a": pair(), "b": pair()}) for _ in range(1))


MODULES: dict[str, tuple[Any, list[tuple[str, list[str]]]]] = {
    "no list": (pair, [("0.weight", ["0"]), ("1.weight", ["1"])]),
    "a list": (
        lambda: nn.ModuleList(pair() for _ in range(2)),
        [("0", ["0.0", "0.1"]), ("1", ["1.0", "1.1"])],
    ),
    "a list of layers": (
        lambda: nn.ModuleList(pair()),
        [("0.weight", ["0"]), ("1.weight", ["1"])],
    ),
    "lists in a list": (
        lambda: nn.ModuleList([Experts()]),
        [
            ("0", ["0.router", "0.out"]),
            ("0.experts.0", ["0.experts.0.0", "0.experts.0.1"]),
            ("0.experts.1", ["0.experts.1.0", "0.experts.1.1"]),
        ],
    ),
    "dictionaries in a list": (
        dictionaries,
        [("0.a", ["0.a.0", "0.a.1"]), ("0.b", ["0.b.0", "0.b.1"])],
    ),
    "a layer in two blocks": (
        with_shared_layer,
        [("0.0.weight", ["0.0"]), ("0.1.weight", ["0.1"]), ("1.1.weight", ["1.1"])],
    ),
    "a weight in two blocks": (
        with_tied_weight,
        [("0.0.weight", ["0.0"]), ("0", ["0.1", "0.2"]), ("1", ["1.1", "1.2"])],
    ),
    "a block partly frozen": (
        partly_frozen,
        [("0 from 0.0.weight", ["0.0", "0.2"]), ("0 from 0.1.weight", ["0.1", "0.3"])],
    ),
    "a block of two types": (
        of_two_types,
        [("0 from 0.0.weight", ["0.0", "0.1"]), ("0 from 0.2.weight", ["0.2", "0.3"])],
    ),
    "a layer of two matrices": (
        lambda: nn.ModuleList([TwoMatrices()]),
        [("0", ["0", "0.other"])],
    ),
}


def bundles_of(kind: str, blocks: Blocks = members_of_lists) -> list[tuple[str, list[str]]]:
    ours = FSDP(MODULES[kind][0](), blocks=blocks)
    return [(b.name, [u.name.removesuffix(".weight") for u in b.units]) for b in ours.bundles]


@pytest.mark.parametrize("kind", MODULES)
def test_matrices_below_one_member_of_a_list_travel_together(ranks: RankPool, kind: str) -> None:
    assert ranks.run(bundles_of, 2, kind=kind)[0] == MODULES[kind][1]


def test_which_travel_together_can_be_said(ranks: RankPool) -> None:
    alone = ranks.run(bundles_of, 2, kind="a list", blocks=each_alone)[0]
    assert [names for _, names in alone] == [["0.0"], ["0.1"], ["1.0"], ["1.1"]]
    together = ranks.run(bundles_of, 2, kind="a list", blocks=all_together)[0]
    assert together == [("model", ["0.0", "0.1", "1.0", "1.1"])]


def stranger(module: nn.Module) -> list[nn.Module]:
    return [nn.Tanh()]


def refuse() -> None:
    with pytest.raises(ValueError, match=r"^blocks: Tanh is not allowed; modules of the model are"):
        FSDP(pair(), blocks=stranger)


def test_a_block_must_be_in_the_model(ranks: RankPool) -> None:
    ranks.run(refuse, 2)


def log_of_blocks(prefetch: int) -> list[str]:
    """The second step: whose messages leave, between the moments at which blocks compute."""
    widths = range(4, 8)
    blocks = nn.ModuleList(
        nn.Sequential(nn.Linear(width, 2 * width), nn.Linear(2 * width, width + 1))
        for width in widths
    )
    ours = FSDP(nn.Sequential(*blocks), prefetch=prefetch, blocks=lambda _: blocks)
    size = [sum(unit.whole.numel() for unit in bundle.units) for bundle in ours.bundles]
    with recorded_messages() as log:
        for number, block in enumerate(blocks):
            block[0].register_forward_pre_hook(lambda _m, _i, n=number: log.append(f"block {n}"))
        for _ in range(2):
            log.clear()
            output = ours(torch.randn(2, 4, requires_grad=True))
            log.append("backward")
            output.sum().backward()
            log.append("finish")
            ours.finish_gradient_synchronization()
    symbols = {"all-gather": "gather", "reduce-scatter": "scatter"}
    return [
        m if isinstance(m, str) else f"{symbols[m.kind]} {size.index(m.numel)}"
        for m in log
        if isinstance(m, str) or m.kind in symbols
    ]


@every_world
def test_a_block_is_gathered_at_once_and_the_next_before_it_computes(
    ranks: RankPool, world_size: int
) -> None:
    for log in ranks.run(log_of_blocks, world_size, prefetch=1):
        assert log == [
            *["gather 0", "gather 1", "block 0", "gather 2", "block 1"],
            *["gather 3", "block 2", "block 3"],
            "backward",
            *["gather 2", "scatter 3", "gather 1", "scatter 2"],
            *["gather 0", "scatter 1", "scatter 0"],
            "finish",
        ]


def test_without_prefetch_a_block_is_sent_for_when_it_is_called(ranks: RankPool) -> None:
    assert ranks.run(log_of_blocks, 2, prefetch=0)[0] == [
        *["gather 0", "block 0", "gather 1", "block 1"],
        *["gather 2", "block 2", "gather 3", "block 3"],
        "backward",
        *["scatter 3", "gather 2", "scatter 2", "gather 1", "scatter 1", "gather 0", "scatter 0"],
        "finish",
    ]


class UsedInPart(Block):
    """A block with a matrix that no step uses."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.idle = nn.Linear(3, 4, bias=False)


class ReadsItsLayers(Block):
    """Computes with the weights of its layers past their forward."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        up = nn.functional.linear(y, self.up.weight, self.up.bias)
        output: Tensor = x + self.down(torch.tanh(up) * self.gate(y))
        return output


class NamesItsInput(Block):
    """Is handed its input by name, and gives out more than one thing."""

    def forward(self, *, hidden: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        return {"hidden": super().forward(hidden), "norm": self.norm(hidden)}


class OfNamedInputs(InBlocks):
    """Takes what it needs from what its blocks give out."""

    def through(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(hidden=x)["hidden"]
        return x


class CalledInPieces(InBlocks):
    """Calls the layers of its blocks, never a block."""

    def through(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            y = block.norm(x)
            x = x + block.down(torch.tanh(block.up(y)) * block.gate(y))
        return x


class Repeated(InBlocks):
    """Goes through all of its blocks twice."""

    def through(self, x: Tensor) -> Tensor:
        return super().through(super().through(x))


class Skipping(InBlocks):
    """Leaves out a block, another one each time, so that what is forecast is wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.turn = 0

    def through(self, x: Tensor) -> Tensor:
        self.turn += 1
        for number, block in enumerate(self.blocks):
            x = x if number == self.turn % 3 else block(x)
        return x


class Recomputed(InBlocks):
    """Keeps nothing of its blocks but their inputs."""

    reentrant = False

    def through(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x


class RecomputedReentrantly(Recomputed):
    """The same, in the older way of torch, by a backward within a backward."""

    reentrant = True


class RecomputedInOne(InBlocks):
    """Keeps nothing of all its blocks together."""

    def through(self, x: Tensor) -> Tensor:
        output: Tensor = checkpoint(super().through, x, use_reentrant=False)
        return output


USES: dict[str, tuple[type[InBlocks], type[Block]]] = {
    "as a whole": (InBlocks, Block),
    "without one of its matrices": (InBlocks, UsedInPart),
    "reading its layers' weights": (InBlocks, ReadsItsLayers),
    "by names": (OfNamedInputs, NamesItsInput),
    "layer by layer": (CalledInPieces, Block),
    "twice": (Repeated, Block),
    "not always": (Skipping, Block),
    "and recomputed": (Recomputed, Block),
    "and recomputed reentrantly": (RecomputedReentrantly, Block),
    "and recomputed with the others": (RecomputedInOne, Block),
    "in part and recomputed": (Recomputed, UsedInPart),
    "in part and recomputed reentrantly": (RecomputedReentrantly, UsedInPart),
}


def model_of(use: str, frozen: bool = False) -> nn.Module:
    """Three blocks of a kind between an embedding and a head, used in a way."""
    torch.manual_seed(0)
    model, block = USES[use]
    module = model()
    module.blocks = nn.ModuleList(block(7) for _ in range(3))
    if frozen:
        for each in module.blocks:
            each.up.weight.requires_grad_(False)
            each.gate.weight.requires_grad_(False)
    return module


def train_unusual(use: str, frozen: bool) -> None:
    ours, alone = FSDP(model_of(use, frozen)), model_of(use, frozen)
    optimizers = [sgd(ours.parameters()), sgd(alone.parameters())]
    for step in range(4):
        for optimizer in optimizers:
            optimizer.zero_grad()
        batch = batch_of(0, step)
        backward(ours, own_part(batch))
        backward(alone, batch)
        assert_near(gradients(ours.module), own_rows(ours, gradients(alone)), 1e-6)
        assert not any(bundle.gathered for bundle in ours.bundles)
        for optimizer in optimizers:
            optimizer.step()
    assert_near(ours.gather_full_parameters(), parameters(alone), 1e-6)


@every_world
@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "partly frozen"])
@pytest.mark.parametrize("use", USES)
def test_however_a_block_is_used(ranks: RankPool, use: str, frozen: bool, world_size: int) -> None:
    ranks.run(train_unusual, world_size, use=use, frozen=frozen)


def log_of_parts(use: str) -> tuple[list[str], Counter[str]]:
    ours = FSDP(model_of(use))
    with recorded_messages() as log:
        for step in range(2):
            log.clear()
            ours(own_part(batch_of(0, step))).sum().backward()
            in_backward = Counter(message.kind for message in log)
            ours.finish_gradient_synchronization()
    idle = [name for name, p in ours.module.named_parameters() if p.grad is None]
    return idle, in_backward


@pytest.mark.parametrize("use", [use for use, (_, block) in USES.items() if block is UsedInPart])
def test_gradients_leave_during_backward_without_one_that_never_comes(
    ranks: RankPool, use: str
) -> None:
    idle, in_backward = ranks.run(log_of_parts, 2, use=use)[0]
    assert idle == [f"blocks.{number}.idle.weight" for number in range(3)]
    assert in_backward["reduce-scatter"] == 5


def look_between() -> None:
    ours = FSDP(build("blocks", 0))
    state = ours.state_dict()
    for step in range(2):
        output = ours(own_part(batch_of(0, step)))
    assert [bundle.name for bundle in ours.bundles if bundle.gathered] == ["head.weight"]
    shards = {unit.shard for unit in ours.units}
    assert shards <= set(ours.parameters())
    ours.load_state_dict(state)
    with torch.no_grad():
        again = ours(own_part(batch_of(0, 1)))
    assert not any(bundle.gathered for bundle in ours.bundles)
    assert torch.equal(again, output)
    dist.barrier()


def test_between_forward_and_backward_only_the_last_block_is_whole(ranks: RankPool) -> None:
    ranks.run(look_between, 2)
