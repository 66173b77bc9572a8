"""Activation checkpointing of our model, from outside: what is kept, what is computed again.

Backward needs what forward computed. Kept whole, that is N blocks' worth. Kept only at the borders
of segments of k blocks, it is N/k inputs, and while backward goes through a segment the k blocks'
worth that are computed again from its input: one forward pass more in time. If an input costs s and
a block's activations a, the sum (N/k) s + k a is smallest at k = sqrt(N s / a). The well-known
sqrt(N) is the case a = s; in a Transformer with plain attention a block's activations are tens of
times its input. And where gradients weigh more than inputs, the peak comes at backward's end, when
the other segments' inputs are gone: then the best segment is the shortest whatever the sum says.

Segments can be checkpointed inside segments. `nested` halves: the model is two checkpointed halves,
each of which, when computed again, is two checkpointed halves, down to single blocks. At any time
one input a level is kept and one block's activations, so what is kept grows with log N; every level
computes its blocks once more, so time grows with log N too.

A strategy is a name: `none`, `every-4`, `nested`. It is applied for the length of a `with` block,
by putting segments in the place of the model's list of blocks; parameters and their order stay.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, cast

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

NONE, NESTED = "none", "nested"
EVERY = re.compile(r"every-([1-9]\d*)\Z")


class StrategyError(ValueError):
    """A strategy that does not exist, or a model that has no blocks, in one line."""


@dataclass(frozen=True)
class Strategy:
    """What is kept for backward."""

    kind: Literal["none", "every", "nested"]
    blocks: int = 0
    """Blocks of a segment, for `every`."""


def strategy_named(name: str) -> Strategy:
    """Read `none`, `nested`, or `every-K`."""
    if name in (NONE, NESTED):
        return Strategy(cast(Literal["none", "nested"], name))
    if found := EVERY.match(name):
        return Strategy("every", int(found[1]))
    raise StrategyError(f"checkpoint: {name!r} is not known; allowed are none, every-K, nested")


class Segment(nn.Module):
    """Blocks of which only the input is kept; inside, further segments or the blocks themselves."""

    def __init__(self, parts: Sequence[nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, x: Tensor) -> Tensor:
        """The parts one after the other, computed again when backward comes here."""
        # There is no dropout, so there is no random state to save and set back.
        result: Tensor = checkpoint(self._run, x, use_reentrant=False, preserve_rng_state=False)
        return result

    def _run(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = part(x)
        return x


def segments(blocks: Sequence[nn.Module], strategy: Strategy) -> list[nn.Module]:
    """What stands in the place of the blocks."""
    if strategy.kind == "every":
        size = strategy.blocks
        return [Segment(blocks[i : i + size]) for i in range(0, len(blocks), size)]
    if strategy.kind == "nested":
        return _halves(blocks)
    return list(blocks)


@contextmanager
def checkpointed(model: nn.Module, strategy: Strategy) -> Iterator[nn.Module]:
    """The model with its blocks under a strategy, as it was again afterwards."""
    blocks = getattr(model, "layers", None)
    if not isinstance(blocks, nn.ModuleList):
        raise StrategyError(f"checkpoint: {type(model).__name__} has no list of blocks `layers`")
    model.layers = nn.ModuleList(segments(list(blocks), strategy))
    try:
        yield model
    finally:
        model.layers = blocks


def _halves(blocks: Sequence[nn.Module]) -> list[nn.Module]:
    """Two checkpointed halves, each made of checkpointed halves; a block alone is its own half."""
    if len(blocks) == 1:
        return [Segment(blocks)]
    middle = (len(blocks) + 1) // 2
    return [_half(blocks[:middle]), _half(blocks[middle:])]


def _half(blocks: Sequence[nn.Module]) -> nn.Module:
    return Segment(blocks if len(blocks) == 1 else _halves(blocks))
