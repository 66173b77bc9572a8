"""Small models, one for each thing that distributed training can get wrong."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lmlab.model.transformer import TransformerLM

VOCABULARY = 13
LENGTH = 5


class TorchLayers(nn.Module):
    """Torch's layers, with biases, a buffer, and sizes that 2 and 3 do not divide."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 7)
        self.inner = nn.Linear(7, 11)
        self.norm = nn.LayerNorm(11)
        self.head = nn.Linear(11, 5)
        self.register_buffer("scale", torch.rand(1) + 0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = torch.tanh(self.inner(self.embedding(tokens)))
        output: Tensor = self.head(self.norm(hidden)) * self.scale
        return output


class Tied(nn.Module):
    """The embedding is the head: one parameter at two locations."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 7)
        self.inner = nn.Linear(7, 7)
        self.head = nn.Linear(7, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        output: Tensor = self.head(torch.tanh(self.inner(self.embedding(tokens))))
        return output


class Frozen(TorchLayers):
    """A weight and a bias that are not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.inner.weight.requires_grad_(False)
        self.head.bias.requires_grad_(False)


class MixedDtypes(nn.Module):
    """Parameters of two dtypes, interleaved."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 6)
        self.wide = nn.Linear(6, 9, dtype=torch.float64)
        self.norm = nn.LayerNorm(9)
        self.head = nn.Linear(9, 4, dtype=torch.float64)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.wide(self.embedding(tokens).double())
        output: Tensor = self.head(self.norm(hidden.float()).double())
        return output


class WithUnusedLayer(TorchLayers):
    """A layer that no forward uses."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(3, 3)


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


def recomputed(blocks: nn.ModuleList, x: Tensor) -> Tensor:
    for block in blocks:
        x = checkpoint(block, x, use_reentrant=False)
    return x


def recomputed_reentrantly(blocks: nn.ModuleList, x: Tensor) -> Tensor:
    for block in blocks:
        x = checkpoint(block, x, use_reentrant=True)
    return x


class Blocks(nn.Module):
    """A list of blocks between an embedding and a head."""

    def __init__(self, run: Run = in_order, block: Callable[[int], nn.Module] = Block) -> None:
        super().__init__()
        self.run = run
        self.embedding = nn.Embedding(VOCABULARY, 7)
        self.blocks = nn.ModuleList(block(7) for _ in range(3))
        self.head = nn.Linear(7, 5)

    def forward(self, tokens: Tensor) -> Tensor:
        output: Tensor = self.head(self.run(self.blocks, self.embedding(tokens)))
        return output


class ExactLinear(nn.Module):
    """A linear map whose sums do not depend on the batch.

    With one sample per rank, the gradient of a batch of two is the sum of the same two terms, with
    the same rounding, on two ranks and in one process.
    """

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs) / inputs**0.5)

    def forward(self, x: Tensor) -> Tensor:
        return (x.unsqueeze(-2) * self.weight).sum(-1)


class Exact(nn.Module):
    """A network whose gradients on two samples are bitwise equal however they are split."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 6)
        self.inner = ExactLinear(6, 5)
        self.head = ExactLinear(5, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        output: Tensor = self.head(F.relu(self.inner(self.embedding(tokens[:, 0]))))
        return output


def transformer() -> TransformerLM:
    """The model of the study, small."""
    return TransformerLM(VOCABULARY, LENGTH, d_model=10, num_layers=1, num_heads=1, d_ff=15)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "transformer": transformer,
    "layers": TorchLayers,
    "tied": Tied,
    "frozen": Frozen,
    "mixed_dtypes": MixedDtypes,
    "unused_layer": WithUnusedLayer,
    "blocks": Blocks,
    "recomputed": lambda: Blocks(recomputed),
    "recomputed_reentrantly": lambda: Blocks(recomputed_reentrantly),
}


def build(name: str, seed: int = 0) -> nn.Module:
    """A model with the weights of a seed."""
    torch.manual_seed(seed)
    return Exact() if name == "exact" else MODELS[name]()
