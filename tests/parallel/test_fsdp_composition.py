"""FSDP in models that use their weights in unusual ways, and steps that go wrong."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lmlab.parallel import FSDP
from lmlab.parallel.fsdp_blocks import Blocks, each_alone
from tests.parallel.launcher import RankPool
from tests.parallel.models import all_together, build
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


def compose(how: str, frozen: bool, blocks: Blocks) -> None:
    torch.manual_seed(0)
    alone = Composed(how)
    if frozen:
        alone.first.requires_grad_(False)
        alone.inner[2].requires_grad_(False)
    module = Composed(how)
    module.load_state_dict(alone.state_dict())
    for theirs, own in zip(alone.parameters(), module.parameters(), strict=True):
        own.requires_grad_(theirs.requires_grad)
    ours = FSDP(module, blocks=blocks)
    x = torch.randn(3 * dist.get_world_size(), 4, 5)
    optimizers = [sgd(ours.parameters()), sgd(alone.parameters())]
    for _ in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        backward(ours, own_part(x))
        backward(alone, x)
        assert_near(gradients(ours.module), own_rows(ours, gradients(alone)), 1e-6)
        assert not any(bundle.gathered for bundle in ours.bundles)
        for optimizer in optimizers:
            optimizer.step()


@pytest.mark.parametrize("blocks", [each_alone, all_together], ids=["alone", "together"])
@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "partly frozen"])
@pytest.mark.parametrize("how", COMPOSITIONS)
def test_however_layers_are_composed(
    ranks: RankPool, how: str, frozen: bool, blocks: Blocks
) -> None:
    ranks.run(compose, 2, how=how, frozen=frozen, blocks=blocks)


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


def evaluate_between_steps(model: str) -> None:
    ours, alone = FSDP(build(model, 0)), build(model, 0)
    optimizers = [sgd(ours.parameters()), sgd(alone.parameters())]
    for step in range(3):
        for context in (torch.no_grad, torch.inference_mode):
            with context():
                assert torch.equal(ours(batch_of(0, 9)), alone(batch_of(0, 9))) or step > 0
        for contestant, optimizer, batch in (
            (ours, optimizers[0], own_part(batch_of(0, step))),
            (alone, optimizers[1], batch_of(0, step)),
        ):
            optimizer.zero_grad()
            backward(contestant, batch)
            optimizer.step()
    assert_near(ours.gather_full_parameters(), parameters(alone), 1e-6)


@pytest.mark.parametrize("model", ["torch's layers", "blocks"])
def test_evaluation_between_steps(ranks: RankPool, model: str) -> None:
    ranks.run(evaluate_between_steps, 2, model=model)


def fail_in_forward(model: str) -> None:
    ours, alone = FSDP(build(model, 0)), build(model, 0)
    with pytest.raises(IndexError):
        ours(batch_of(0, 0) + 1000)
    backward(ours, own_part(batch_of(0, 0)))
    backward(alone, batch_of(0, 0))
    assert_near(gradients(ours.module), own_rows(ours, gradients(alone)), 1e-6)
    assert not any(bundle.gathered or bundle.users for bundle in ours.bundles)


@pytest.mark.parametrize("model", ["torch's layers", "blocks"])
def test_a_forward_that_failed_leaves_nothing_behind(ranks: RankPool, model: str) -> None:
    ranks.run(fail_in_forward, 2, model=model)


def fail_in_backward(model: str, layer: str) -> None:
    ours, alone = FSDP(build(model, 0)), build(model, 0)

    def explode(gradient: Tensor) -> None:
        raise ArithmeticError("in the middle of backward")

    handle = ours.module.get_submodule(layer).register_forward_hook(
        lambda _module, _inputs, output: output.register_hook(explode) and None
    )
    with pytest.raises(ArithmeticError):
        backward(ours, own_part(batch_of(0, 0)))
    handle.remove()
    ours.finish_gradient_synchronization()
    ours.zero_grad()
    backward(ours, own_part(batch_of(0, 1)))
    backward(alone, batch_of(0, 1))
    assert_near(gradients(ours.module), own_rows(ours, gradients(alone)), 1e-6)
    assert not any(bundle.gathered or bundle.users for bundle in ours.bundles)


@pytest.mark.parametrize(
    ("model", "layer"),
    [
        pytest.param("torch's layers", "inner", id="between layers"),
        pytest.param("blocks", "blocks.1", id="between blocks"),
        pytest.param("blocks", "blocks.1.up", id="within a block"),
    ],
)
def test_a_backward_that_failed_leaves_nothing_once_it_is_finished(
    ranks: RankPool, model: str, layer: str
) -> None:
    ranks.run(fail_in_backward, 2, model=model, layer=layer)
