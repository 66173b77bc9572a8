"""FSDP with models that use their weights in unusual ways, what it shards, its compute dtype."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lmlab.parallel import FSDP
from lmlab.parallel.fsdp import has_matrix_weight
from tests.parallel import models, training
from tests.parallel.launcher import on_ranks
from tests.parallel.models import Block, Model, build, in_blocks, in_order, recomputed_reentrantly
from tests.parallel.training import backward, batch_of, own_part, recorded_messages, sgd, train_both


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


USES: dict[str, Callable[[], Any]] = {
    "partly": lambda: in_blocks(block=PartlyUsed),
    "reading_weights": lambda: in_blocks(block=ReadsWeights),
    "with_keywords": lambda: in_blocks(with_keywords, WithKeywords),
    "layer_by_layer": lambda: in_blocks(layer_by_layer),
    "twice": lambda: in_blocks(twice),
    "sometimes": lambda: in_blocks(Sometimes()),
    "recomputed_at_once": lambda: in_blocks(recomputed_at_once),
    "partly_recomputed": lambda: in_blocks(models.recomputed, PartlyUsed),
    "partly_recomputed_reentrantly": lambda: in_blocks(recomputed_reentrantly, PartlyUsed),
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
    batches = map(batch_of, range(training.STEPS))
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


COMPOSED: dict[str, Callable[[Any, Tensor], Tensor]] = {
    # An output is a view, for three dimensions.
    "output_modified_in_place": lambda m, x: m.first(m.second(x).tanh()).add_(x).relu_(),
    "layer_used_twice": lambda m, x: m.first(m.second(m.first(x).tanh()).tanh()),
    "view_of_a_weight": lambda m, x: m.second(x + m.positions(x)),
    "partly_without_gradient": lambda m, x: m.second(torch.no_grad()(m.first)(x)),
    "detached_branch": lambda m, x: m.second(x) + m.first(x).detach(),
}


def composed(how: str) -> Model:
    """Two layers, and one that returns a view of its weight, which outlives the gathered one."""
    weight = nn.Parameter(torch.randn(7, 5))
    positions = Model(lambda m, x: m.weight[: x.shape[-2]], weight=weight)
    linears = {"first": nn.Linear(5, 5), "second": nn.Linear(5, 5)}
    return Model(COMPOSED[how], **linears, positions=positions)


@pytest.mark.parametrize("how", COMPOSED)
@pytest.mark.parametrize("frozen", [False, True], ids=["", "frozen"])
@on_ranks(2)
def test_layers_may_be_composed(how: str, frozen: bool) -> None:
    for blocks in (lambda model: [], lambda model: [model]):
        alone = composed(how)
        alone.first.requires_grad_(not frozen)
        wrapped = FSDP(copy.deepcopy(alone), blocks=blocks)
        x = torch.randn(3 * dist.get_world_size(), 4, 5)
        train_both(wrapped, alone, [x] * 3)


@on_ranks(2)
def test_torchs_attention_reads_a_weight_without_calling_its_layer() -> None:
    layer = nn.TransformerEncoderLayer(6, 2, 10, dropout=0.0, batch_first=True)
    alone = nn.Sequential(layer, nn.Linear(6, 3))
    wrapped, in_bf16 = (FSDP(copy.deepcopy(alone), dtype) for dtype in (None, torch.bfloat16))
    x = torch.randn(2 * dist.get_world_size(), 4, 6)
    train_both(wrapped, alone, [x] * 2)
    sharded = ["0.linear1.weight", "0.linear2.weight", "1.weight"]
    assert [param.name for param in wrapped.sharded_params] == sharded
    assert in_bf16(x).dtype == torch.bfloat16
    backward(in_bf16, x)  # layers with a replicated matrix compute in fp32
    assert all(torch.isfinite(p.grad).all() for p in in_bf16.parameters())


@pytest.mark.parametrize("model", ["layers", "blocks"])
@on_ranks(2)
def test_evaluation_and_a_failed_forward_leave_nothing_behind(model: str) -> None:
    wrapped, alone = training.wrapped_and_alone("fsdp", model)
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
    wrapped = training.SCHEMES[scheme](copy.deepcopy(alone))
    train_both(wrapped, alone, [torch.randn(2 * dist.get_world_size(), 3)] * 2)
    assert wrapped.module[0].weight.shape[0] == (1 if dist.get_rank() == 0 else 0)


@on_ranks(2)
def test_a_predicate_chooses_the_sharded_layers() -> None:
    wrapped = FSDP(build("layers"), shards=lambda layer: getattr(layer, "out_features", 0) > 10)
    backward(wrapped, own_part(batch_of(0)))
    assert [param.name for param in wrapped.sharded_params] == ["inner.weight"]
    own = Model(torch.mul, weight=nn.Parameter(torch.ones(2, 2)))
    by_default = nn.Linear(2, 2), nn.Embedding(2, 2), own
    others = nn.LayerNorm(2), nn.Tanh(), nn.Sequential(nn.Linear(2, 2))
    assert all(map(has_matrix_weight, by_default))
    assert not any(map(has_matrix_weight, others))


both_dtypes = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)


@both_dtypes
@on_ranks(2)
def test_the_dtype_is_for_messages_and_products_what_persists_is_fp32(dtype: torch.dtype) -> None:
    wrapped = FSDP(build("layers"), dtype)
    inside: dict[str, Any] = {}

    def record(name: str, layer: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        own = [p.dtype for p in layer.parameters(recurse=False)]
        inside[name] = (args[0].dtype, own, output.dtype)

    for name in ("inner", "norm", "head"):
        # Runs before FSDP's own hooks, while the layer holds its full weight.
        getattr(wrapped.module, name).register_forward_hook(partial(record, name), prepend=True)
    with recorded_messages() as log:
        backward(wrapped, own_part(batch_of(0)))
    assert inside["inner"] == inside["head"] == (dtype, [dtype, dtype], dtype)
    assert inside["norm"] == (torch.float32, [torch.float32] * 2, torch.float32)
    sent = {"all-gather": dtype, "reduce-scatter": dtype, "all-reduce": torch.float32}
    assert {message.kind: message.dtype for message in log} == sent
    optimizer = torch.optim.AdamW(wrapped.parameters())
    optimizer.step()
    persistent = [
        *wrapped.parameters(),
        *(p.grad for p in wrapped.parameters()),
        *(state["exp_avg"] for state in optimizer.state.values()),
        *wrapped.gather_full_parameters().values(),
    ]
    assert {tensor.dtype for tensor in persistent} == {torch.float32}


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 9), nn.Tanh(), nn.Linear(9, 5), nn.Tanh(), nn.Linear(5, 3))


def train_in(dtype: torch.dtype, device: str = "cpu") -> None:
    """Train in a dtype on ranks, in fp32 in one process."""
    for blocks in (lambda model: [model], lambda model: []):
        wrapped, alone = FSDP(mlp().to(device), dtype, blocks=blocks), mlp().to(device)
        ours, theirs = sgd(wrapped.parameters()), sgd(alone.parameters())
        for _ in range(10):
            x = torch.randn(4 * dist.get_world_size(), 7).to(device)
            for model, batch, optimizer in ((wrapped, own_part(x), ours), (alone, x, theirs)):
                optimizer.zero_grad()
                backward(model, batch)
                optimizer.step()
        expected = training.parameters(alone)
        training.assert_near(wrapped.gather_full_parameters(), expected, torch.finfo(dtype).eps)


@both_dtypes
@on_ranks(3)
def test_training_follows_fp32_within_the_precision(dtype: torch.dtype) -> None:
    train_in(dtype)
