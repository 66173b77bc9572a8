"""Our fused AdamW and our LM head with loss next to the library's, by the kernel clock.

Each is checked first. AdamW updates the parameters of one model size: our loop, PyTorch's fused
optimizer and our kernel, on copies of the same state. The loss runs forward and backward over the
tokens of one batch: plain, compiled, in chunks of tokens that are computed again in backward, and
our kernel.

Records with the labels part (adamw, loss) and variant: `time`, `bytes` (AdamW: 28 per parameter),
`flops` (loss: three matmuls), `peak_memory` above the inputs (loss), `error` against the library.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lmlab.chapters.attention.measure.compiling import compiler
from lmlab.chapters.attention.measure.rounds import sample_in_turns, sampling_budget
from lmlab.chapters.attention.measure.variants import Variants, WrongNumbers
from lmlab.chapters.fastest_step.measure.trainer import allocated_bytes
from lmlab.jobs.outcome import Outcome, Unsupported
from lmlab.kernels.adamw import FusedAdamW
from lmlab.kernels.fused_loss import fused_linear_cross_entropy
from lmlab.measure.device import peak_memory_bytes, reset_peak_memory
from lmlab.measure.precision import why_unsupported
from lmlab.measure.records import Record, value
from lmlab.model.adamw import AdamW
from lmlab.model.shape import ModelShape
from lmlab.study.points import Point

CHUNKS = 8
MOST_BLOCKS = 4
"""Of a large model: each optimizer has its own copy of parameters, gradients and moments."""
BYTES_PER_PARAMETER = 28
"""fp32 weight, gradient and two moments read, three of them written."""
WITHIN = {"adamw": 1e-5, "loss": 3e-2}
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def measure(point: Point, device: torch.device) -> Outcome:
    """Both parts, one after the other."""
    if device.type != "cuda":
        raise Unsupported("our kernels are written in Triton, which a CPU only interprets")
    if reason := why_unsupported("bf16", device):
        raise Unsupported(reason)
    asked = {**point.settings, **point.parameters}
    shape = ModelShape(**{key: asked[key] for key in ModelShape.__dataclass_fields__})
    torch.manual_seed(asked["seed"])
    return Outcome(measurements=[*adamw(shape, asked, device), *loss(shape, asked, device)])


def adamw(shape: ModelShape, asked: dict[str, Any], device: torch.device) -> list[Record]:
    """An optimizer step over the parameters of the first blocks and of the embedding."""
    width, hidden = shape.d_model, shape.d_ff
    block: list[tuple[int, ...]] = (
        [(width, width)] * 4 + [(hidden, width)] * 2 + [(width, hidden)] + [(width,)] * 2
    )
    shapes = block * min(shape.num_layers, MOST_BLOCKS) + [(shape.vocab_size, width)]
    kinds = {
        "ours": FusedAdamW,
        "library": partial(torch.optim.AdamW, fused=True),
        "loop": AdamW,
    }
    variants = Variants({name: {"part": "adamw"} for name in kinds}, device)
    steps: dict[str, Callable[[], object]] = {}
    parameters: dict[str, list[nn.Parameter]] = {}
    for name, kind in kinds.items():
        with variants.attempt(name):
            torch.manual_seed(asked["seed"])
            own = [nn.Parameter(torch.randn(each, device=device)) for each in shapes]
            for each in own:
                each.grad = torch.randn_like(each)
            optimizer: Any = kind(own)  # type: ignore[operator]
            steps[name], parameters[name] = optimizer.step, own
            optimizer.step()
    for name in variants.running:
        with variants.attempt(name):
            pairs = zip(parameters[name], parameters["library"], strict=True)
            error = max((a - b).abs().max().item() for a, b in pairs)
            check(variants, name, "adamw", error)
    count = sum(each.numel() for each in parameters["library"])
    sample_in_turns(
        variants,
        {name: partial(lambda call: call, steps[name]) for name in variants.running},
        device,
        sampling_budget(asked),
    )
    moved = value("bytes", BYTES_PER_PARAMETER * count, "B", part="adamw")
    return [moved, value("parameters", count, "", part="adamw"), *variants.records]


def loss(shape: ModelShape, asked: dict[str, Any], device: torch.device) -> list[Record]:
    """LM head and cross-entropy, forward and backward, in bf16."""
    kinds: dict[str, Loss] = {
        "plain": plain,
        "compiled": torch.compile(plain, dynamic=False),
        "chunked": chunked,
        "ours": fused_linear_cross_entropy,
    }
    hidden = torch.randn(shape.tokens, shape.d_model, device=device, dtype=torch.bfloat16)
    weight = torch.randn(shape.vocab_size, shape.d_model, device=device, dtype=torch.bfloat16)
    weight /= shape.d_model**0.5
    inputs = hidden.requires_grad_(), weight.requires_grad_()
    targets = torch.randint(shape.vocab_size, (shape.tokens,), device=device)

    def call(kind: Loss) -> tuple[Tensor, ...]:
        found = kind(*inputs, targets)
        return (found.detach(), *torch.autograd.grad(found, inputs))

    variants = Variants({name: {"part": "loss"} for name in kinds}, device)
    with compiler():
        expected = call(plain)
        for name, kind in kinds.items():
            with variants.attempt(name):
                call(kind)
                before = allocated_bytes(device)
                reset_peak_memory(device)
                found = call(kind)
                peak = (peak_memory_bytes(device) or 0) - before
                variants.note(name, "peak_memory", peak, "B")
                pairs = zip(found, expected, strict=True)
                error = max(((a - b).float().norm() / b.float().norm()).item() for a, b in pairs)
                check(variants, name, "loss", error)
        calls = {
            name: partial(lambda kind: partial(call, kind), kinds[name])
            for name in variants.running
        }
        sample_in_turns(variants, calls, device, sampling_budget(asked))
    count = 6 * shape.tokens * shape.d_model * shape.vocab_size
    return [value("flops", count, "FLOP", part="loss"), *variants.records]


def plain(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Two operations, with the logits in between."""
    return F.cross_entropy(F.linear(hidden, weight).float(), targets)


def chunked(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """The same over chunks of tokens, each of which is computed again in backward."""

    def part(own: Tensor, words: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(own, words).float(), labels, reduction="sum")

    pairs = zip(hidden.chunk(CHUNKS), targets.chunk(CHUNKS), strict=True)
    parts = [checkpoint(part, x, weight, y, use_reentrant=False) for x, y in pairs]
    total: Tensor = torch.stack(parts).sum()
    return total / targets.numel()


def check(variants: Variants, name: str, part: str, error: float) -> None:
    """Record the error of a variant; raise if it is not explained by rounding."""
    variants.note(name, "error", error, "")
    if not error <= WITHIN[part]:
        raise WrongNumbers(f"{part}: differs by {error:.1e}; allowed: {WITHIN[part]:.0e}")
