"""FSDP with models that use their weights in unusual ways, and what it shards."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lmlab.parallel import FSDP
from lmlab.parallel.fsdp import has_matrix_weight
from lmlab.parallel.fsdp_blocks import no_blocks
from tests.parallel.launcher import RankPool
from tests.parallel.models import Block, Blocks, ExactLinear, build
from tests.parallel.recording import recorded_messages
from tests.parallel.training import (
    SCHEMES,
    STEPS,
    backward,
    batch_of,
    own_part,
    train_both,
    wrapped_and_alone,
)


class PartlyUsed(Block):
    """A block with a matrix that no step uses."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.unused = nn.Linear(3, 4, bias=False)


class ReadsWeights(Block):
    """Reads the weight of a layer without calling the layer."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        up = nn.functional.linear(y, self.up.weight, self.up.bias)
        output: Tensor = x + self.down(torch.tanh(up) * self.gate(y))
        return output


class WithKeywords(Block):
    """Takes a keyword argument and returns several tensors."""

    def forward(self, *, hidden: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        return {"hidden": super().forward(hidden), "norm": self.norm(hidden)}


class CallsWithKeywords(Blocks):
    def run_blocks(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(hidden=x)["hidden"]
        return x


class CallsLayers(Blocks):
    """Calls the layers of its blocks, never a block."""

    def run_blocks(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            y = block.norm(x)
            x = x + block.down(torch.tanh(block.up(y)) * block.gate(y))
        return x


class Repeats(Blocks):
    def run_blocks(self, x: Tensor) -> Tensor:
        return super().run_blocks(super().run_blocks(x))


class Skips(Blocks):
    """Skips another block each time, so that the predicted order is wrong."""

    turn = 0

    def run_blocks(self, x: Tensor) -> Tensor:
        self.turn += 1
        for number, block in enumerate(self.blocks):
            x = x if number == self.turn % 3 else block(x)
        return x


class Recomputes(Blocks):
    reentrant = False

    def run_blocks(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x


class RecomputesReentrantly(Recomputes):
    reentrant = True


class RecomputesAll(Blocks):
    def run_blocks(self, x: Tensor) -> Tensor:
        output: Tensor = checkpoint(super().run_blocks, x, use_reentrant=False)
        return output


USES: dict[str, tuple[type[Blocks], type[Block]]] = {
    "normally": (Blocks, Block),
    "partly": (Blocks, PartlyUsed),
    "reading_weights": (Blocks, ReadsWeights),
    "with_keywords": (CallsWithKeywords, WithKeywords),
    "layer_by_layer": (CallsLayers, Block),
    "twice": (Repeats, Block),
    "sometimes": (Skips, Block),
    "recomputed": (Recomputes, Block),
    "recomputed_reentrantly": (RecomputesReentrantly, Block),
    "recomputed_at_once": (RecomputesAll, Block),
    "partly_recomputed": (Recomputes, PartlyUsed),
    "partly_recomputed_reentrantly": (RecomputesReentrantly, PartlyUsed),
}


def model_with(use: str, frozen: bool = False) -> nn.Module:
    torch.manual_seed(0)
    model, block = USES[use]
    module = model()
    module.blocks = nn.ModuleList(block(7) for _ in range(3))
    for each in module.blocks if frozen else ():
        each.up.weight.requires_grad_(False)
        each.gate.weight.requires_grad_(False)
    return module


def train_with(use: str, frozen: bool) -> None:
    batches = map(batch_of, range(STEPS))
    train_both(FSDP(model_with(use, frozen)), model_with(use, frozen), batches)


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize(("frozen", "world_size"), [(False, 3), (True, 2)], ids=["", "frozen"])
def test_blocks_may_be_used(ranks: RankPool, use: str, frozen: bool, world_size: int) -> None:
    ranks.run(train_with, world_size, use=use, frozen=frozen)


def reductions_in_backward(use: str) -> tuple[list[str], int]:
    wrapped = FSDP(model_with(use))
    with recorded_messages() as log:
        for step in range(2):
            log.clear()
            wrapped(own_part(batch_of(step))).sum().backward()
            number = sum(message.kind == "reduce-scatter" for message in log)
            wrapped.finish_gradient_synchronization()
    return [name for name, p in wrapped.module.named_parameters() if p.grad is None], number


@pytest.mark.parametrize("use", [use for use, (_, block) in USES.items() if block is PartlyUsed])
def test_gradients_are_sent_in_backward_although_one_never_comes(ranks: RankPool, use: str) -> None:
    unused = [f"blocks.{number}.unused.weight" for number in range(3)]
    assert ranks.run(reductions_in_backward, 2, use=use)[0] == (unused, 5)


class Positions(nn.Module):
    """Returns a view of its weight, which must outlive the gathered weight."""

    def __init__(self, number: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(number, width))

    def forward(self, length: int) -> Tensor:
        return self.weight[:length]


class Composed(nn.Module):
    """Ways to compose layers, one per method."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.first, self.second = nn.Linear(5, 5), nn.Linear(5, 5)
        self.positions = Positions(7, 5)
        self.inner = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 5))

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = getattr(self, self.how)(x)
        return output

    def output_modified_in_place(self, x: Tensor) -> Tensor:
        hidden = self.first(torch.tanh(self.second(x)))  # a view, for three dimensions
        hidden += x
        return hidden.relu_()

    def layer_used_twice(self, x: Tensor) -> Tensor:
        return self.first(torch.tanh(self.second(torch.tanh(self.first(x)))))

    def view_of_a_weight(self, x: Tensor) -> Tensor:
        return self.second(x + self.positions(x.shape[-2]))

    def checkpointed(self, x: Tensor) -> Tensor:
        x = checkpoint(self.inner, self.first(x), use_reentrant=False)
        return checkpoint(self.inner, torch.tanh(x), use_reentrant=False)

    def checkpointed_reentrantly(self, x: Tensor) -> Tensor:
        x = self.first(x) + self.positions(x.shape[-2])  # needs an input that requires a gradient
        return checkpoint(self.inner, torch.tanh(x), use_reentrant=True)

    def partly_without_gradient(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            x = self.first(x)
        return self.second(x)

    def detached_branch(self, x: Tensor) -> Tensor:
        return self.second(x) + self.first(x).detach()


def compose(how: str) -> None:
    for frozen in (False, True):
        for blocks in (no_blocks, lambda model: [model]):
            alone = Composed(how)
            alone.first.requires_grad_(not frozen)
            alone.inner[2].requires_grad_(not frozen)
            wrapped = FSDP(copy.deepcopy(alone), blocks=blocks)
            x = torch.randn(3 * dist.get_world_size(), 4, 5)
            train_both(wrapped, alone, [x] * 3)


@pytest.mark.parametrize("how", [n for n in vars(Composed) if n[0] != "_" and n != "forward"])
def test_layers_may_be_composed(ranks: RankPool, how: str) -> None:
    ranks.run(compose, 2, how=how)


def train_torchs_encoder_layer() -> list[str]:
    layer = nn.TransformerEncoderLayer(6, 2, 10, dropout=0.0, batch_first=True)
    alone = nn.Sequential(layer, nn.Linear(6, 3))
    wrapped = FSDP(copy.deepcopy(alone))
    train_both(wrapped, alone, [torch.randn(2 * dist.get_world_size(), 4, 6)] * 2)
    return [param.name for param in wrapped.sharded_params]


def test_torchs_attention_reads_a_weight_without_calling_its_layer(ranks: RankPool) -> None:
    sharded = ["0.linear1.weight", "0.linear2.weight", "1.weight"]
    assert ranks.run(train_torchs_encoder_layer, 2)[0] == sharded


def evaluate_and_fail_between_steps(model: str) -> None:
    wrapped, alone = wrapped_and_alone("fsdp", model)
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            assert torch.equal(wrapped(batch_of(9)), alone(batch_of(9)))
    with pytest.raises(IndexError):
        wrapped(batch_of(0) + 1000)
    train_both(wrapped, alone, map(batch_of, range(2)))


@pytest.mark.parametrize("model", ["layers", "blocks"])
def test_evaluation_and_a_failed_forward_leave_nothing_behind(ranks: RankPool, model: str) -> None:
    ranks.run(evaluate_and_fail_between_steps, 2, model=model)


def look_between_forward_and_backward() -> None:
    wrapped = FSDP(build("blocks"))
    state = wrapped.state_dict()
    for step in range(2):
        output = wrapped(own_part(batch_of(step)))
    assert [group.name for group in wrapped.groups if group.gathered] == ["head.weight"]
    assert {param.shard for param in wrapped.sharded_params} <= set(wrapped.parameters())
    wrapped.load_state_dict(state)
    with torch.no_grad():
        again = wrapped(own_part(batch_of(1)))
    assert not any(group.gathered for group in wrapped.groups)
    assert torch.equal(again, output)


def test_between_forward_and_backward_only_the_last_group_is_gathered(ranks: RankPool) -> None:
    ranks.run(look_between_forward_and_backward, 2)


def shapes_of_shards() -> dict[str, tuple[int, ...]]:
    return {n: tuple(p.shape) for n, p in FSDP(build("layers")).module.named_parameters()}


@pytest.mark.parametrize(
    ("world_size", "rows"), [(2, [(7, 6), (6, 5), (3, 2)]), (3, [(5, 5, 3), (4, 4, 3), (2, 2, 1)])]
)
def test_matrices_are_split_by_rows_and_the_rest_is_replicated(
    ranks: RankPool, world_size: int, rows: list[tuple[int, ...]]
) -> None:
    full = {name: tuple(p.shape) for name, p in build("layers").named_parameters()}
    for rank, shapes in enumerate(ranks.run(shapes_of_shards, world_size)):
        embedding, inner, head = (split[rank] for split in rows)
        shards = {"embedding.weight": (embedding, 7), "inner.weight": (inner, 7)}
        shards["head.weight"] = (head, 11)
        assert shapes == full | shards


def train_with_more_ranks_than_rows(scheme: str) -> list[int]:
    alone = nn.Sequential(nn.Linear(3, 1), nn.Linear(1, 2))
    wrapped = SCHEMES[scheme](copy.deepcopy(alone))
    train_both(wrapped, alone, [torch.randn(2 * dist.get_world_size(), 3)] * 2)
    return [p.shape[0] for p in wrapped.module[0].parameters()]


@pytest.mark.parametrize("scheme", ["fsdp", "fsdp_one_group"])
def test_a_rank_may_have_no_rows(ranks: RankPool, scheme: str) -> None:
    rows = ranks.run(train_with_more_ranks_than_rows, 3, scheme=scheme)
    assert rows == [[1, 1], [0, 1], [0, 1]]


def shard_large_layers() -> list[str]:
    wrapped = FSDP(build("layers"), shards=lambda layer: getattr(layer, "out_features", 0) > 10)
    backward(wrapped, own_part(batch_of(0)))
    return [param.name for param in wrapped.sharded_params]


def test_a_predicate_chooses_the_sharded_layers(ranks: RankPool) -> None:
    assert ranks.run(shard_large_layers, 2)[0] == ["inner.weight"]


@pytest.mark.parametrize(
    ("layer", "accepted"),
    [
        (nn.Linear(2, 2), True),
        (nn.Embedding(2, 2), True),
        (ExactLinear(2, 2), True),
        (nn.LayerNorm(2), False),
        (nn.Tanh(), False),
        (nn.Sequential(nn.Linear(2, 2)), False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_by_default_layers_with_a_matrix_are_sharded(layer: Any, accepted: bool) -> None:
    assert has_matrix_weight(layer) is accepted
