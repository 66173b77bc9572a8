"""Activation checkpointing applied to a model from outside, by replacing its list of blocks.

With N blocks in segments of k, only the N/k segment inputs (s bytes each) are saved; backward
recomputes one segment at a time and holds the activations of its k blocks (a bytes each). The price
is one more forward pass. (N/k) s + k a is smallest at k = sqrt(N s / a). The well-known sqrt(N) is
the case a = s; in a Transformer with plain attention a is tens of times s. Where gradients outweigh
inputs, the peak is at the end of backward, with all other inputs freed, and k = 1 is best.

`nested` checkpoints halves within halves, down to single blocks. At any time one input per level
and one block's activations exist, so memory grows with log N; so does time, because every level
recomputes its blocks once more. A strategy is a name: `none`, `every-4`, `nested`.
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class StrategyError(ValueError):
    """An unknown strategy, or a model without a list of blocks, in one line."""


@dataclass(frozen=True)
class Strategy:
    """Which block inputs are saved for backward."""

    kind: str  # none, every or nested
    blocks: int = 0  # blocks per segment, for `every`


def parse_strategy(name: str) -> Strategy:
    """Parse `none`, `nested` or `every-K`."""
    if name in ("none", "nested"):
        return Strategy(name)
    if match := re.fullmatch(r"every-([1-9]\d*)", name):
        return Strategy("every", int(match[1]))
    raise StrategyError(f"checkpoint must be none, every-K or nested, got {name!r}")


class Segment(nn.Module):
    """Consecutive blocks or nested segments; only their first input is saved for backward."""

    def __init__(self, parts: Sequence[nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, x: Tensor) -> Tensor:
        # There is no dropout, so there is no random state to preserve.
        result: Tensor = checkpoint(self._run, x, use_reentrant=False, preserve_rng_state=False)
        return result

    def _run(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = part(x)
        return x


def segments(blocks: Sequence[nn.Module], strategy: Strategy) -> list[nn.Module]:
    """The modules that replace `blocks` under a strategy."""
    if strategy.kind == "every":
        size = strategy.blocks
        return [Segment(blocks[i : i + size]) for i in range(0, len(blocks), size)]
    return _halves(blocks) if strategy.kind == "nested" else list(blocks)


@contextmanager
def checkpointed(model: nn.Module, strategy: Strategy) -> Iterator[nn.Module]:
    """Apply a strategy to the model's blocks, and restore the model afterwards."""
    blocks = getattr(model, "layers", None)
    if not isinstance(blocks, nn.ModuleList):
        raise StrategyError(f"checkpoint: {type(model).__name__} has no list of blocks `layers`")
    model.layers = nn.ModuleList(segments(list(blocks), strategy))
    try:
        yield model
    finally:
        model.layers = blocks


def _halves(blocks: Sequence[nn.Module]) -> list[nn.Module]:
    """Two checkpointed halves, each split the same way down to single blocks."""
    if len(blocks) == 1:
        return [Segment(blocks)]
    middle = (len(blocks) + 1) // 2
    halves = blocks[:middle], blocks[middle:]
    return [Segment(half if len(half) == 1 else _halves(half)) for half in halves]
