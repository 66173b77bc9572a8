"""What FSDP cuts, what it keeps, what it saves and loads, and what it refuses."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lmlab.parallel import FSDP
from lmlab.parallel.fsdp import holds_matrix_weight
from tests.parallel.launcher import RankPool
from tests.parallel.models import OneSampleAtATime, build
from tests.parallel.training import assert_near, backward, batch_of, own_part, parameters


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
