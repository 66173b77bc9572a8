"""FSDP with models that use their weights in unusual ways, and what it shards."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lmlab.parallel import FSDP
from lmlab.parallel.fsdp import has_matrix_weight
from lmlab.parallel.fsdp_blocks import no_blocks
from tests.parallel.launcher import on_ranks
from tests.parallel.models import (
    Block,
    Blocks,
    ExactLinear,
    build,
    in_order,
    recomputed,
    recomputed_reentrantly,
)
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


def with_keywords(blocks: nn.ModuleList, x: Tensor) -> Tensor:
    for block in blocks:
        x = block(hidden=x)["hidden"]
    return x


def layer_by_layer(blocks: nn.ModuleList, x: Tensor) -> Tensor:
    for block in blocks:
        y = block.norm(x)
        x = x + block.down(torch.tanh(block.up(y)) * block.gate(y))
    return x


def twice(blocks: nn.ModuleList, x: Tensor) -> Tensor:
    return in_order(blocks, in_order(blocks, x))


def recomputed_at_once(blocks: nn.ModuleList, x: Tensor) -> Tensor:
    output: Tensor = checkpoint(in_order, blocks, x, use_reentrant=False)
    return output


class Sometimes:
    """Skips another block each time, so that the predicted order is wrong."""

    turn = 0

    def __call__(self, blocks: nn.ModuleList, x: Tensor) -> Tensor:
        self.turn += 1
        for number, block in enumerate(blocks):
            x = x if number == self.turn % 3 else block(x)
        return x


USES: dict[str, Callable[[], Blocks]] = {
    "partly": lambda: Blocks(block=PartlyUsed),
    "reading_weights": lambda: Blocks(block=ReadsWeights),
    "with_keywords": lambda: Blocks(with_keywords, WithKeywords),
    "layer_by_layer": lambda: Blocks(layer_by_layer),
    "twice": lambda: Blocks(twice),
    "sometimes": lambda: Blocks(Sometimes()),
    "recomputed_at_once": lambda: Blocks(recomputed_at_once),
    "partly_recomputed": lambda: Blocks(recomputed, PartlyUsed),
    "partly_recomputed_reentrantly": lambda: Blocks(recomputed_reentrantly, PartlyUsed),
}


def model_with(use: str, frozen: bool = False) -> nn.Module:
    torch.manual_seed(0)
    module = USES[use]()
    for block in module.blocks if frozen else ():
        block.up.weight.requires_grad_(False)
        block.gate.weight.requires_grad_(False)
    return module


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("frozen", [False, True], ids=["", "frozen"])
@on_ranks(3)
def test_blocks_may_be_used(use: str, frozen: bool) -> None:
    batches = map(batch_of, range(STEPS))
    train_both(FSDP(model_with(use, frozen)), model_with(use, frozen), batches)


@pytest.mark.parametrize("use", [use for use in USES if "partly" in use])
@on_ranks(2)
def test_gradients_are_sent_in_backward_although_one_never_comes(use: str) -> None:
    wrapped = FSDP(model_with(use))
    for step in range(2):
        with recorded_messages() as log:
            wrapped(own_part(batch_of(step))).sum().backward()
        wrapped.finish_gradient_synchronization()
    assert [message.kind for message in log].count("reduce-scatter") == 5
    unused = [f"blocks.{number}.unused.weight" for number in range(3)]
    assert [n for n, p in wrapped.module.named_parameters() if p.grad is None] == unused


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

    def partly_without_gradient(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            x = self.first(x)
        return self.second(x)

    def detached_branch(self, x: Tensor) -> Tensor:
        return self.second(x) + self.first(x).detach()


@pytest.mark.parametrize("how", [n for n in vars(Composed) if n[0] != "_" and n != "forward"])
@pytest.mark.parametrize("frozen", [False, True], ids=["", "frozen"])
@on_ranks(2)
def test_layers_may_be_composed(how: str, frozen: bool) -> None:
    for blocks in (no_blocks, lambda model: [model]):
        alone = Composed(how)
        alone.first.requires_grad_(not frozen)
        wrapped = FSDP(copy.deepcopy(alone), blocks=blocks)
        x = torch.randn(3 * dist.get_world_size(), 4, 5)
        train_both(wrapped, alone, [x] * 3)


@on_ranks(2)
def test_torchs_attention_reads_a_weight_without_calling_its_layer() -> None:
    layer = nn.TransformerEncoderLayer(6, 2, 10, dropout=0.0, batch_first=True)
    alone = nn.Sequential(layer, nn.Linear(6, 3))
    wrapped = FSDP(copy.deepcopy(alone))
    train_both(wrapped, alone, [torch.randn(2 * dist.get_world_size(), 4, 6)] * 2)
    sharded = ["0.linear1.weight", "0.linear2.weight", "1.weight"]
    assert [param.name for param in wrapped.sharded_params] == sharded


@pytest.mark.parametrize("model", ["layers", "blocks"])
@on_ranks(2)
def test_evaluation_and_a_failed_forward_leave_nothing_behind(model: str) -> None:
    wrapped, alone = wrapped_and_alone("fsdp", model)
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            assert torch.equal(wrapped(batch_of(9)), alone(batch_of(9)))
    with pytest.raises(IndexError):
        wrapped(batch_of(0) + 1000)
    train_both(wrapped, alone, map(batch_of, range(2)))


@on_ranks(2)
def test_between_forward_and_backward_only_the_last_group_is_gathered() -> None:
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


ROWS_BY_WORLD_SIZE = {
    2: {"embedding.weight": (7, 6), "inner.weight": (6, 5), "head.weight": (3, 2)},
    3: {"embedding.weight": (5, 5, 3), "inner.weight": (4, 4, 3), "head.weight": (2, 2, 1)},
}


@on_ranks(2, 3)
def test_matrices_are_split_by_rows_and_the_rest_is_replicated() -> None:
    rows = ROWS_BY_WORLD_SIZE[dist.get_world_size()]
    full = dict(build("layers").named_parameters())
    for name, parameter in FSDP(build("layers")).module.named_parameters():
        number = rows[name][dist.get_rank()] if name in rows else full[name].shape[0]
        assert parameter.shape == (number, *full[name].shape[1:])


@pytest.mark.parametrize("scheme", ["fsdp", "fsdp_one_group"])
@on_ranks(3)
def test_a_rank_may_have_no_rows(scheme: str) -> None:
    alone = nn.Sequential(nn.Linear(3, 1), nn.Linear(1, 2))
    wrapped = SCHEMES[scheme](copy.deepcopy(alone))
    train_both(wrapped, alone, [torch.randn(2 * dist.get_world_size(), 3)] * 2)
    assert wrapped.module[0].weight.shape[0] == (1 if dist.get_rank() == 0 else 0)


@on_ranks(2)
def test_a_predicate_chooses_the_sharded_layers() -> None:
    wrapped = FSDP(build("layers"), shards=lambda layer: getattr(layer, "out_features", 0) > 10)
    backward(wrapped, own_part(batch_of(0)))
    assert [param.name for param in wrapped.sharded_params] == ["inner.weight"]


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
