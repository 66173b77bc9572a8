"""Our fused AdamW and our fused LM head and loss against PyTorch's, by the kernel clock.

Each is checked first. AdamW updates the embedding and up to four blocks of a model: our loop,
PyTorch's fused optimizer and our kernel, on copies of the same state. The loss runs forward and
backward over the tokens of one batch: plain, compiled, in chunks of tokens that are recomputed in
backward, and our kernel.

Records with the labels part (adamw, loss) and variant: `time`, `parameters` and `bytes` (AdamW: 28
per parameter), `flops` (loss: three matmuls), `peak_memory` above the inputs (loss), `launches`,
`error` against PyTorch.
"""

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lmlab.chapters.attention.measure.compiling import compiler
from lmlab.chapters.fastest_step.measure.rungs import refuse_without_bf16, shape_of
from lmlab.chapters.principles.measure.programs import INTERPRETED, Program, compare
from lmlab.jobs.outcome import Outcome
from lmlab.kernels.adamw import FusedAdamW
from lmlab.kernels.fused_loss import fused_linear_cross_entropy
from lmlab.measure.records import Record, value
from lmlab.model.adamw import AdamW
from lmlab.model.shape import ModelShape
from lmlab.study.points import Point

CHUNKS = 8
MOST_BLOCKS = 4
"""Of a large model: each optimizer has its own copy of parameters, gradients and moments."""
BYTES_PER_PARAMETER = 28
"""fp32 weight, gradient and two moments read, three of them written."""
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def measure(point: Point, device: torch.device) -> Outcome:
    """Both parts, one after the other."""
    refuse_without_bf16(device, INTERPRETED)
    asked = {**point.settings, **point.parameters}
    shape = shape_of(asked)
    torch.manual_seed(asked["seed"])
    return Outcome(measurements=[*adamw(shape, asked, device), *loss(shape, asked, device)])


def adamw(shape: ModelShape, asked: dict[str, Any], device: torch.device) -> list[Record]:
    """An optimizer step over the parameters of the first blocks and of the embedding."""
    width, hidden = shape.d_model, shape.d_ff
    block: list[tuple[int, ...]] = (
        [(width, width)] * 4 + [(hidden, width)] * 2 + [(width, hidden)] + [(width,)] * 2
    )
    shapes = block * min(shape.num_layers, MOST_BLOCKS) + [(shape.vocab_size, width)]
    library = partial(torch.optim.AdamW, fused=True)
    kinds: dict[str, Any] = {"ours": FusedAdamW, "library": library, "loop": AdamW}

    @cache
    def optimizer(name: str) -> tuple[list[nn.Parameter], Callable[[], object]]:
        torch.manual_seed(asked["seed"])
        own = [nn.Parameter(torch.randn(each, device=device)) for each in shapes]
        for each in own:
            each.grad = torch.randn_like(each)
        return own, kinds[name](own).step

    def step(name: str) -> list[nn.Parameter]:
        own, run = optimizer(name)
        run()
        return own

    expected = [each.detach().clone() for each in step("library")]
    optimizer.cache_clear()
    error = partial(largest_difference, expected)
    programs = {
        name: Program(call=partial(step, name), error=error, within=1e-5, part="adamw")
        for name in kinds
    }
    variants = compare(programs, asked, device)
    count = sum(each.numel() for each in expected)
    moved = value("bytes", BYTES_PER_PARAMETER * count, "B", part="adamw")
    return [moved, value("parameters", count, "", part="adamw"), *variants.records]


def largest_difference(expected: Sequence[Tensor], found: Sequence[Tensor]) -> float:
    """Largest absolute difference of any element."""
    return max((a - b).abs().max().item() for a, b in zip(found, expected, strict=True))


def loss(shape: ModelShape, asked: dict[str, Any], device: torch.device) -> list[Record]:
    """LM head and cross-entropy, forward and backward, in bf16."""
    hidden = torch.randn(shape.tokens, shape.d_model, device=device, dtype=torch.bfloat16)
    weight = torch.randn(shape.vocab_size, shape.d_model, device=device, dtype=torch.bfloat16)
    weight /= shape.d_model**0.5
    inputs = hidden.requires_grad_(), weight.requires_grad_()
    targets = torch.randint(shape.vocab_size, (shape.tokens,), device=device)

    def call(kind: Loss) -> tuple[Tensor, ...]:
        found = kind(*inputs, targets)
        return (found.detach(), *torch.autograd.grad(found, inputs))

    with compiler():
        kinds: dict[str, Loss] = {
            "plain": plain,
            "compiled": torch.compile(plain, dynamic=False),
            "chunked": chunked,
            "ours": fused_linear_cross_entropy,
        }
        error = partial(largest_relative_error, call(plain))
        checked = partial(Program, error=error, within=3e-2, part="loss", has_peak=True)
        programs = {name: checked(call=partial(call, kind)) for name, kind in kinds.items()}
        variants = compare(programs, asked, device)
    count = 6 * shape.tokens * shape.d_model * shape.vocab_size
    return [value("flops", count, "FLOP", part="loss"), *variants.records]


def largest_relative_error(expected: Sequence[Tensor], found: Sequence[Tensor]) -> float:
    """Largest relative error of the loss or of a gradient."""
    pairs = zip(found, expected, strict=True)
    return max(((a - b).float().norm() / b.float().norm()).item() for a, b in pairs)


def plain(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """LM head, then cross-entropy, with all logits in memory in between."""
    return F.cross_entropy(F.linear(hidden, weight).float(), targets)


def chunked(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """The same in chunks of tokens, each recomputed in backward."""

    def part(own: Tensor, words: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(own, words).float(), labels, reduction="sum")

    pairs = zip(hidden.chunk(CHUNKS), targets.chunk(CHUNKS), strict=True)
    parts = [checkpoint(part, x, weight, y, use_reentrant=False) for x, y in pairs]
    total: Tensor = torch.stack(parts).sum()
    return total / targets.numel()
