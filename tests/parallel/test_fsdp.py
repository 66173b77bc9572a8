"""FSDP computes what one process computes on all samples, and what torch's fully_shard does."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lmlab.parallel import FSDP
from lmlab.parallel.fsdp import holds_matrix_weight
from tests.parallel.launcher import RankPool
from tests.parallel.models import MODELS, OneSampleAtATime, build
from tests.parallel.training import (
    STEPS,
    assert_near,
    backward,
    batch_of,
    gradients,
    loss_of,
    own_part,
    own_rows,
    parameters,
    quietly,
    sgd,
)

every_world = pytest.mark.parametrize("world_size", [2, 3], ids=lambda n: f"{n} ranks")


def torch_fsdp(module: nn.Module, **options: Any) -> nn.Module:
    """Torch's own, each layer with a matrix by itself and the rest together."""
    from torch.distributed.fsdp import fully_shard

    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in list(module.modules()):
        if holds_matrix_weight(layer):
            fully_shard(layer, mesh=mesh, **options)
    return fully_shard(module, mesh=mesh, **options)


def train_beside_one_process_and_torch(model: str, seeds: list[int], theirs_too: bool) -> None:
    for seed in seeds:
        ours = FSDP(build(model, seed + 100 * dist.get_rank()))
        alone = build(model, seed)
        contestants: list[nn.Module] = [ours, alone]
        if theirs_too:
            contestants.append(torch_fsdp(build(model, seed)))
        optimizers = [sgd(contestant.parameters()) for contestant in contestants]
        for step in range(STEPS):
            batch = batch_of(seed, step)
            for contestant, optimizer in zip(contestants, optimizers, strict=True):
                optimizer.zero_grad()
                part = batch if contestant is alone else own_part(batch)
                quietly(backward, contestant, part)
            expected = own_rows(ours, gradients(alone))
            assert_near(gradients(ours.module), expected, 1e-6)
            for optimizer in optimizers:
                optimizer.step()
        whole = ours.gather_full_parameters()
        assert_near(whole, parameters(alone), 1e-6)
        if theirs_too:
            theirs = {n: p.full_tensor().detach() for n, p in contestants[2].named_parameters()}
            assert_near(whole, theirs, 1e-6)


@every_world
@pytest.mark.parametrize("model", MODELS)
def test_ten_steps_follow_one_process_and_torch(
    ranks: RankPool, model: str, world_size: int
) -> None:
    theirs_too = model != "tied weights"  # torch's refuses them layer by layer
    ranks.run(
        train_beside_one_process_and_torch,
        world_size,
        model=model,
        seeds=[0, 1] if world_size == 2 else [2],
        theirs_too=theirs_too,
    )


def train_on_one_sample_a_rank(seed: int) -> None:
    ours, alone = FSDP(build("exact", seed)), build("exact", seed)
    optimizers = [sgd(ours.parameters()), sgd(alone.parameters())]
    for step in range(STEPS):
        batch = batch_of(seed, step, samples_per_rank=1)
        for optimizer in optimizers:
            optimizer.zero_grad()
        backward(ours, own_part(batch))
        backward(alone, batch)
        assert_near(gradients(ours.module), own_rows(ours, gradients(alone)), 0.0)
        for optimizer in optimizers:
            optimizer.step()
    assert_near(ours.gather_full_parameters(), parameters(alone), 0.0)


@pytest.mark.parametrize("seed", range(3), ids=lambda seed: f"seed {seed}")
def test_two_ranks_give_the_bits_of_one_process_where_sums_allow_it(
    ranks: RankPool, seed: int
) -> None:
    ranks.run(train_on_one_sample_a_rank, 2, seed=seed)


class Composed(nn.Module):
    """Uses of weights that are easy to get wrong; each is a method of its own name."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.first, self.second = nn.Linear(5, 5), nn.Linear(5, 5)
        self.positions = Positions(7, 5)
        self.inner = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 5))

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = getattr(self, self.how)(x)
        return output

    def changed_in_place(self, x: Tensor) -> Tensor:
        hidden = self.first(torch.tanh(self.second(x)))  # a view, for three dimensions
        hidden += x
        return hidden.relu_()

    def one_layer_twice(self, x: Tensor) -> Tensor:
        return self.first(torch.tanh(self.second(torch.tanh(self.first(x)))))

    def slice_of_a_weight(self, x: Tensor) -> Tensor:
        return self.second(x + self.positions(x.shape[-2]))

    def checkpointed(self, x: Tensor) -> Tensor:
        x = checkpoint(self.inner, self.first(x), use_reentrant=False)
        return checkpoint(self.inner, torch.tanh(x), use_reentrant=False)

    def checkpointed_reentrantly(self, x: Tensor) -> Tensor:
        x = self.first(x) + self.positions(x.shape[-2])  # this kind needs a trained input
        return checkpoint(self.inner, torch.tanh(x), use_reentrant=True)

    def without_gradient_in_part(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            x = self.first(x)
        return self.second(x)

    def with_a_detached_branch(self, x: Tensor) -> Tensor:
        return self.second(x) + self.first(x).detach()


class Positions(nn.Module):
    """Gives out its weight itself: a view whose memory must outlive the gathered weight."""

    def __init__(self, number: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(number, width))

    def forward(self, length: int) -> Tensor:
        return self.weight[:length]


COMPOSITIONS = [name for name in vars(Composed) if name[0] != "_" and name != "forward"]


def compose(how: str, frozen: bool) -> None:
    torch.manual_seed(0)
    alone = Composed(how)
    if frozen:
        alone.first.requires_grad_(False)
        alone.inner[2].requires_grad_(False)
    module = Composed(how)
    module.load_state_dict(alone.state_dict())
    for theirs, own in zip(alone.parameters(), module.parameters(), strict=True):
        own.requires_grad_(theirs.requires_grad)
    ours = FSDP(module)
    x = torch.randn(3 * dist.get_world_size(), 4, 5)
    optimizers = [sgd(ours.parameters()), sgd(alone.parameters())]
    for _ in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        backward(ours, own_part(x))
        backward(alone, x)
        assert_near(gradients(ours.module), own_rows(ours, gradients(alone)), 1e-6)
        assert not any(unit.gathered for unit in ours.units)
        for optimizer in optimizers:
            optimizer.step()


@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "partly frozen"])
@pytest.mark.parametrize("how", COMPOSITIONS)
def test_however_layers_are_composed(ranks: RankPool, how: str, frozen: bool) -> None:
    ranks.run(compose, 2, how=how, frozen=frozen)


def backward_after_backward(model: nn.Module, batches: list[Tensor]) -> None:
    for batch in batches:
        loss_of(model(batch)).backward()


def all_forwards_first(model: nn.Module, batches: list[Tensor]) -> None:
    losses = [loss_of(model(batch)) for batch in batches]
    for loss in losses:
        loss.backward()


def twice_through_one_graph(model: nn.Module, batches: list[Tensor]) -> None:
    loss = loss_of(model(batches[0]))
    loss.backward(retain_graph=True)
    loss.backward()


ACCUMULATIONS: dict[str, Callable[[nn.Module, list[Tensor]], None]] = {
    "backward after backward": backward_after_backward,
    "all forwards first": all_forwards_first,
    "twice through one graph": twice_through_one_graph,
}


def accumulate(how: str) -> None:
    for model in ("idle layer", "tied weights"):
        ours, alone = FSDP(build(model, seed=0)), build(model, seed=0)
        for step in range(3):
            batches = [batch_of(step, number) for number in range(3)]
            for parameter in (*ours.parameters(), *alone.parameters()):
                parameter.grad = None
            ACCUMULATIONS[how](ours, [own_part(batch) for batch in batches])
            ours.finish_gradient_synchronization()
            ACCUMULATIONS[how](alone, batches)
            assert_near(gradients(ours.module), own_rows(ours, gradients(alone)), 1e-6)


@pytest.mark.parametrize("how", ACCUMULATIONS)
def test_gradients_of_several_batches_add_up(ranks: RankPool, how: str) -> None:
    ranks.run(accumulate, 3, how=how)


def shapes_of_shards() -> dict[str, tuple[int, ...]]:
    ours = FSDP(build("torch's layers", seed=0))
    return {name: tuple(p.shape) for name, p in ours.module.named_parameters()}


@pytest.mark.parametrize(
    ("world_size", "rows"), [(2, [(7, 6), (6, 5), (3, 2)]), (3, [(5, 5, 3), (4, 4, 3), (2, 2, 1)])]
)
def test_matrices_are_cut_by_rows_and_the_rest_is_whole(
    ranks: RankPool, world_size: int, rows: list[tuple[int, ...]]
) -> None:
    embedding, inner, head = rows
    for rank, shapes in enumerate(ranks.run(shapes_of_shards, world_size)):
        assert shapes == {
            "embedding.weight": (embedding[rank], 7),
            "inner.weight": (inner[rank], 7),
            "inner.bias": (11,),
            "norm.weight": (11,),
            "norm.bias": (11,),
            "head.weight": (head[rank], 11),
            "head.bias": (5,),
        }


def more_ranks_than_rows() -> list[int]:
    torch.manual_seed(0)
    alone = nn.Sequential(nn.Linear(3, 1), nn.Linear(1, 2))
    module = nn.Sequential(nn.Linear(3, 1), nn.Linear(1, 2))
    module.load_state_dict(alone.state_dict())
    ours = FSDP(module)
    optimizers = [torch.optim.AdamW(m.parameters()) for m in (ours, alone)]
    x = torch.randn(2 * dist.get_world_size(), 3)
    backward(ours, own_part(x))
    backward(alone, x)
    for optimizer in optimizers:
        optimizer.step()
    assert_near(ours.gather_full_parameters(), parameters(alone), 1e-6)
    return [p.shape[0] for p in ours.module[0].parameters()]


def test_a_rank_may_be_left_without_a_row(ranks: RankPool) -> None:
    assert ranks.run(more_ranks_than_rows, 3) == [[1, 1], [0, 1], [0, 1]]


def only_large_layers() -> list[str]:
    ours = FSDP(
        build("torch's layers", 0), shards=lambda layer: getattr(layer, "out_features", 0) > 10
    )
    backward(ours, own_part(batch_of(0, 0)))
    return [unit.name for unit in ours.units]


def test_a_predicate_says_which_layers_are_sharded(ranks: RankPool) -> None:
    assert ranks.run(only_large_layers, 2)[0] == ["inner.weight"]


@pytest.mark.parametrize(
    ("layer", "accepted"),
    [
        pytest.param(nn.Linear(2, 2), True, id="torch's linear"),
        pytest.param(nn.Embedding(2, 2), True, id="torch's embedding"),
        pytest.param(OneSampleAtATime(2, 2), True, id="anyone's"),
        pytest.param(nn.LayerNorm(2), False, id="a vector"),
        pytest.param(nn.Tanh(), False, id="nothing"),
        pytest.param(nn.Sequential(nn.Linear(2, 2)), False, id="a container"),
    ],
)
def test_by_default_layers_with_a_matrix_as_weight_are_sharded(
    layer: nn.Module, accepted: bool
) -> None:
    assert holds_matrix_weight(layer) is accepted


def save(model: str) -> tuple[dict[str, Tensor], list[str]]:
    ours = FSDP(build(model, seed=3))
    assert list(ours.gather_full_parameters()) == list(dict(build(model, 3).named_parameters()))
    return ours.state_dict(), [name for name, _ in ours.module.named_parameters()]


def load(model: str, state: dict[str, Tensor]) -> dict[str, Tensor]:
    ours = FSDP(build(model, seed=4))
    ours.load_state_dict(state)
    backward(ours, own_part(batch_of(0, 0)))
    return ours.gather_full_parameters()


@pytest.mark.parametrize("model", ["torch's layers", "tied weights"])
def test_the_state_dictionary_is_the_modules_and_loads_at_another_world_size(
    ranks: RankPool, model: str
) -> None:
    expected = build(model, seed=3)
    for state, _ in ranks.run(save, 2, model=model):
        assert state.keys() == expected.state_dict().keys()
        for name, tensor in expected.state_dict().items():
            assert torch.equal(state[name], tensor)
        build(model, seed=5).load_state_dict(state)
    for loaded in ranks.run(load, 3, model=model, state=state):
        assert_near(loaded, parameters(expected), 0.0)


def train_torchs_transformer() -> None:
    def layer_and_head() -> nn.Module:
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(6, 2, 10, dropout=0.0, batch_first=True)
        return nn.Sequential(layer, nn.Linear(6, 3))

    ours, alone = FSDP(layer_and_head()), layer_and_head()
    x = torch.randn(2 * dist.get_world_size(), 4, 6)
    for _ in range(2):
        for parameter in (*ours.parameters(), *alone.parameters()):
            parameter.grad = None
        backward(ours, own_part(x))
        backward(alone, x)
        assert_near(gradients(ours.module), own_rows(ours, gradients(alone)), 1e-6)
    sharded = ["0.linear1.weight", "0.linear2.weight", "1.weight"]
    assert [unit.name for unit in ours.units] == sharded


def test_attention_of_torch_which_reads_a_weight_past_its_layer(ranks: RankPool) -> None:
    ranks.run(train_torchs_transformer, 2)


def evaluate_between_steps() -> None:
    ours, alone = FSDP(build("torch's layers", 0)), build("torch's layers", 0)
    optimizers = [sgd(ours.parameters()), sgd(alone.parameters())]
    for step in range(3):
        for context in (torch.no_grad, torch.inference_mode):
            with context():
                assert torch.equal(ours(batch_of(0, 9)), alone(batch_of(0, 9))) or step > 0
        for model, optimizer, batch in (
            (ours, optimizers[0], own_part(batch_of(0, step))),
            (alone, optimizers[1], batch_of(0, step)),
        ):
            optimizer.zero_grad()
            backward(model, batch)
            optimizer.step()
    assert_near(ours.gather_full_parameters(), parameters(alone), 1e-6)


def test_evaluation_between_steps(ranks: RankPool) -> None:
    ranks.run(evaluate_between_steps, 2)


def fail_in_forward() -> None:
    ours, alone = FSDP(build("torch's layers", 0)), build("torch's layers", 0)
    with pytest.raises(IndexError):
        ours(batch_of(0, 0) + 1000)
    backward(ours, own_part(batch_of(0, 0)))
    backward(alone, batch_of(0, 0))
    assert_near(gradients(ours.module), own_rows(ours, gradients(alone)), 1e-6)
    assert not any(unit.gathered or unit.users for unit in ours.units)


def test_a_forward_that_failed_leaves_nothing_behind(ranks: RankPool) -> None:
    ranks.run(fail_in_forward, 2)


def refuse() -> None:
    module = build("torch's layers", 0)
    with pytest.raises(ValueError, match=r"^compute_dtype: torch.int8 is not allowed; a float"):
        FSDP(module, torch.int8)
    with pytest.raises(ValueError, match=r"^prefetch: -1 is not allowed"):
        FSDP(module, prefetch=-1)
    with pytest.raises(ValueError, match=r"^shards: LayerNorm holds no matrix"):
        FSDP(module, shards=lambda layer: isinstance(layer, nn.LayerNorm))
    ours = FSDP(module)
    with pytest.raises(ValueError, match=r"^inner.weight: shape \(2,\) does not fit"):
        ours.load_state_dict({"inner.weight": torch.ones(2)}, strict=False)
    with pytest.raises(ValueError, match=r"^assign: True is not allowed"):
        ours.load_state_dict({}, assign=True)
    frozen = FSDP(build("frozen parameters", 0))
    frozen.module.requires_grad_(True)
    with pytest.raises(ValueError, match=r"^requires_grad: was set to True"):
        frozen.finish_gradient_synchronization()
    ours.to("meta")
    with pytest.raises(ValueError, match=r"^embedding.weight: was moved or replaced after"):
        ours(batch_of(0, 0))
    sparse = FSDP(nn.Embedding(4, 2, sparse=True))
    with pytest.raises(ValueError, match=r"^gradient: a sparse one of shape \(4, 2\)"):
        sparse(torch.tensor([1])).sum().backward()


def test_what_cannot_work_is_said_in_one_line(ranks: RankPool) -> None:
    ranks.run(refuse, 2)
