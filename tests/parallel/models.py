"""Small models, one for each thing that distributed training can get wrong."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lmlab.model.transformer import TransformerLM

VOCABULARY = 13
LENGTH = 5


class Model(nn.Module):
    """Layers, parameters and buffers by name, and a function of them and the input."""

    def __init__(self, compute: Callable[[Any, Tensor], Tensor], **parts: Any) -> None:
        super().__init__()
        self.compute = compute
        for name, part in parts.items():
            if isinstance(part, Tensor) and not isinstance(part, nn.Parameter):
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.compute(self, tokens)


def torch_layers(**more: nn.Module) -> Model:
    """Torch's layers, with biases, a buffer, and sizes that 2 and 3 do not divide."""
    return Model(
        lambda m, x: m.head(m.norm(torch.tanh(m.inner(m.embedding(x))))) * m.scale,
        embedding=nn.Embedding(VOCABULARY, 7),
        inner=nn.Linear(7, 11),
        norm=nn.LayerNorm(11),
        head=nn.Linear(11, 5),
        scale=torch.rand(1) + 0.5,
        **more,
    )


def tied() -> Model:
    """The embedding is the head: one parameter at two locations."""
    model = Model(
        lambda m, x: m.head(torch.tanh(m.inner(m.embedding(x)))),
        embedding=nn.Embedding(VOCABULARY, 7),
        inner=nn.Linear(7, 7),
        head=nn.Linear(7, VOCABULARY, bias=False),
    )
    model.head.weight = model.embedding.weight
    return model


def frozen() -> Model:
    """A weight and a bias that are not trained."""
    model = torch_layers()
    model.inner.weight.requires_grad_(False)
    model.head.bias.requires_grad_(False)
    return model


def mixed_dtypes() -> Model:
    """Parameters of two dtypes, interleaved."""
    return Model(
        lambda m, x: m.head(m.norm(m.wide(m.embedding(x).double()).float()).double()),
        embedding=nn.Embedding(VOCABULARY, 6),
        wide=nn.Linear(6, 9, dtype=torch.float64),
        norm=nn.LayerNorm(9),
        head=nn.Linear(9, 4, dtype=torch.float64),
    )


class Block(nn.Module):
    """Three matrices with rows that neither 2 nor 3 divides, a norm and biases."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.gate = nn.Linear(width, 11), nn.Linear(width, 11, bias=False)
        self.down = nn.Linear(11, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        output: Tensor = x + self.down(torch.tanh(self.up(y)) * self.gate(y))
        return output


Run = Callable[[nn.ModuleList, Tensor], Tensor]


def in_order(blocks: nn.ModuleList, x: Tensor) -> Tensor:
    for block in blocks:
        x = block(x)
    return x


def recomputed(blocks: nn.ModuleList, x: Tensor, reentrant: bool = False) -> Tensor:
    for block in blocks:
        x = checkpoint(block, x, use_reentrant=reentrant)
    return x


recomputed_reentrantly = partial(recomputed, reentrant=True)


def in_blocks(run: Run = in_order, block: Callable[[int], nn.Module] = Block) -> Model:
    """A list of blocks between an embedding and a head."""
    return Model(
        lambda m, x: m.head(run(m.blocks, m.embedding(x))),
        embedding=nn.Embedding(VOCABULARY, 7),
        blocks=nn.ModuleList(block(7) for _ in range(3)),
        head=nn.Linear(7, 5),
    )


class ExactLinear(nn.Module):
    """A linear map whose sums do not depend on the batch: two ranks round like one process."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs) / inputs**0.5)

    def forward(self, x: Tensor) -> Tensor:
        return (x.unsqueeze(-2) * self.weight).sum(-1)


def exact() -> Model:
    """A network whose gradients on two samples are bitwise equal however they are split."""
    return Model(
        lambda m, x: m.head(F.relu(m.inner(m.embedding(x[:, 0])))),
        embedding=nn.Embedding(VOCABULARY, 6),
        inner=ExactLinear(6, 5),
        head=ExactLinear(5, 3),
    )


def odd_shapes() -> Model:
    """A scalar, a transposed matrix, and fewer large parameters than ranks."""
    return Model(
        lambda m, x: torch.stack([p.square().sum() for p in m.parameters()]).sum(),
        weights=nn.ParameterList(torch.randn(s) for s in [(7, 3), (5,), (1, 1), (11, 2), ()]),
        transposed=nn.Parameter(torch.randn(4, 5).t()),
    )


def one_vector() -> Model:
    return Model(lambda m, x: m.weight.square(), weight=nn.Parameter(torch.ones(2)))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "transformer": lambda: TransformerLM(VOCABULARY, LENGTH, 10, 1, 1, 15),
    "layers": torch_layers,
    "tied": tied,
    "frozen": frozen,
    "mixed_dtypes": mixed_dtypes,
    "unused_layer": lambda: torch_layers(unused=nn.Linear(3, 3)),
    "blocks": in_blocks,
    "recomputed": lambda: in_blocks(recomputed),
    "recomputed_reentrantly": lambda: in_blocks(recomputed_reentrantly),
}


def build(name: str, seed: int = 0) -> nn.Module:
    """A model with the weights of a seed."""
    torch.manual_seed(seed)
    return (MODELS | {m.__name__: m for m in (exact, odd_shapes, one_vector)})[name]()
