"""Small models, one for each thing that data parallelism can get wrong, and batches for them."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lmlab.model.transformer import TransformerLM

VOCABULARY = 13
LENGTH = 5


class TorchLayers(nn.Module):
    """Torch's own layers, with biases, a buffer, and sizes that two and three do not divide."""

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
    """The embedding is the head: one parameter with two homes and two uses."""

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
    """A layer in the middle that is not trained, and a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.inner.weight.requires_grad_(False)
        self.head.bias.requires_grad_(False)


class MixedTypes(nn.Module):
    """Parameters of two types, interleaved."""

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


class WithIdleLayer(TorchLayers):
    """A layer that no forward uses."""

    def __init__(self) -> None:
        super().__init__()
        self.idle = nn.Linear(3, 3)


class Block(nn.Module):
    """Three matrices, of rows that neither two nor three divide, with a norm and biases between."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.gate = nn.Linear(width, 11), nn.Linear(width, 11, bias=False)
        self.down = nn.Linear(11, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        output: Tensor = x + self.down(torch.tanh(self.up(y)) * self.gate(y))
        return output


class InBlocks(nn.Module):
    """Repeated blocks in a list, between an embedding and a head: the shape of most models."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 7)
        self.blocks = nn.ModuleList(Block(7) for _ in range(3))
        self.head = nn.Linear(7, 5)

    def forward(self, tokens: Tensor) -> Tensor:
        output: Tensor = self.head(self.through(self.embedding(tokens)))
        return output

    def through(self, x: Tensor) -> Tensor:
        """All blocks, one after the other."""
        for block in self.blocks:
            x = block(x)
        return x


def all_together(module: nn.Module) -> list[nn.Module]:
    """Blocks for FSDP: the model is one, so that all of its matrices share messages."""
    return [module]


class OneSampleAtATime(nn.Module):
    """A linear map of anyone's making, summed in an order that does not depend on the batch.

    Each sample's products are made one by one, so that with one sample a rank the sum over a global
    batch of two has the same two terms, rounded in the same way, wherever it is taken.
    """

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs) / inputs**0.5)

    def forward(self, x: Tensor) -> Tensor:
        return (x.unsqueeze(-2) * self.weight).sum(-1)


class Exact(nn.Module):
    """A network whose gradients on two samples are the same bits however they are split."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 6)
        self.inner = OneSampleAtATime(6, 5)
        self.head = OneSampleAtATime(5, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = F.relu(self.inner(self.embedding(tokens[:, 0])))
        output: Tensor = self.head(hidden)
        return output


def transformer() -> TransformerLM:
    """The model that the study measures, small."""
    return TransformerLM(
        VOCABULARY, LENGTH, d_model=10, num_layers=1, num_heads=1, d_ff=15, attention="naive"
    )


MODELS: dict[str, Callable[[], nn.Module]] = {
    "transformer": transformer,
    "torch's layers": TorchLayers,
    "tied weights": Tied,
    "frozen parameters": Frozen,
    "two types": MixedTypes,
    "idle layer": WithIdleLayer,
    "blocks": InBlocks,
}


def build(name: str, seed: int) -> nn.Module:
    """A model with the weights of a seed."""
    torch.manual_seed(seed)
    return MODELS[name]() if name in MODELS else Exact()


def global_batch(seed: int, step: int, samples: int) -> Tensor:
    """Token ids of all ranks together."""
    generator = torch.Generator().manual_seed(1000 * seed + step)
    return torch.randint(VOCABULARY, (samples, LENGTH), generator=generator)


def loss_of(output: Tensor) -> Tensor:
    """A mean over samples of something that is not linear in the output."""
    return (output.double() + 1.0).square().mean().to(output.dtype)
