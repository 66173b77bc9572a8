"""Precision: three small experiments on what number formats keep and lose.

A float has a fixed number of digits after its leading one, so the distance between neighbours grows
with the number: fp16 near 8 steps by 1/128. Three consequences, one a topic:

- `accumulation`: a sum that grows swallows its terms. `data`: `terms`, `term`, `term_in_fp16`,
  `loops` (name, accumulator, term, result, exact, error) and `fp16_trace`, columns step, sum,
  spacing (distance to the next float) and added (what the sum really grew by), at most 200 rows
  with every change of the spacing among them.
- `autocast`: hence products may be 16 bit and sums should not. `data`: `device`, `dtype` and
  `components`, the types that a toy model's parts really have, as hooks see them.
- `layernorm`: its variance sums squares, and a square doubles the exponent. `data`: `rows`, the
  variance of inputs of growing scale computed in each format, with the largest relative error over
  the tokens; no number but a flag where it overflows. `layernorm_rows`: the largest error of
  `nn.LayerNorm` itself, which keeps 16-bit inputs but takes its statistics in fp32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lmlab.chapters.precision.toy_model import ToyModel, observed_dtypes
from lmlab.jobs.outcome import Outcome, Unsupported
from lmlab.measure.precision import precision_named, why_unsupported
from lmlab.study.points import Point

TRACE_ROWS = 200
FORMATS = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
# Powers of four: fp16's squares vanish at the lower end and overflow at the upper one.
SCALES = tuple(4.0**power for power in range(-7, 7))
TOKENS, FEATURES = 64, 768


def measure(point: Point, device: torch.device) -> Outcome:
    """Run the experiment that the point's topic names."""
    settings, parameters = point.settings, point.parameters
    topic = parameters["topic"]
    if topic == "accumulation":
        return Outcome(data=accumulation(settings["terms"], settings["term"]))
    if topic == "autocast":
        return Outcome(data=autocast(str(parameters["dtype"]), settings["seed"], device))
    if topic == "layernorm":
        return Outcome(data=layernorm(settings["seed"], device))
    raise ValueError(f"topic = {topic!r}; allowed: accumulation, autocast, layernorm")


def accumulation(terms: int, term: float) -> dict[str, Any]:
    """The four loops, on CPU tensors: one rounding an addition, the same on every machine."""
    fp32, fp16 = torch.float32, torch.float16
    if terms * term > torch.finfo(fp16).max:
        raise Unsupported(
            f"terms x term = {terms * term:g}; fp16 ends at {torch.finfo(fp16).max:g}"
        )
    loops = [
        ("fp32", fp32, torch.tensor(term, dtype=fp32)),
        ("fp16", fp16, torch.tensor(term, dtype=fp16)),
        ("fp32_plus_fp16", fp32, torch.tensor(term, dtype=fp16)),
        ("fp32_plus_fp16_cast", fp32, torch.tensor(term, dtype=fp16).to(fp32)),
    ]
    return {
        "terms": terms,
        "term": term,
        "term_in_fp16": torch.tensor(term, dtype=fp16).item(),
        "loops": [
            _loop(name, running_sums(accumulator, added, terms), added, terms * term)
            for name, accumulator, added in loops
        ],
        "fp16_trace": trace(running_sums(fp16, torch.tensor(term, dtype=fp16), terms)),
    }


def running_sums(accumulator: torch.dtype, term: Tensor, terms: int) -> Tensor:
    """The sum after each addition of the term, in the accumulator's format."""
    total = torch.tensor(0.0, dtype=accumulator)
    sums = torch.empty(terms, dtype=accumulator)
    for step in range(terms):
        total += term
        sums[step] = total
    return sums


def _loop(name: str, sums: Tensor, term: Tensor, exact: float) -> dict[str, Any]:
    result = sums[-1].item()
    return {
        "name": name,
        "accumulator": _dtype_name(sums.dtype),
        "term": _dtype_name(term.dtype),
        "result": result,
        "exact": exact,
        "error": result - exact,
    }


def trace(sums: Tensor) -> dict[str, list[float]]:
    """A running sum with the distance to the next float, reduced to where something happens."""
    above = torch.nextafter(sums, torch.full_like(sums, float("inf")))
    spacing = (above - sums).double()
    exact = sums.double()
    added = torch.diff(exact, prepend=torch.zeros(1, dtype=torch.float64))
    kept = _rows_to_keep(spacing)
    return {
        "step": [index + 1 for index in kept],
        "sum": exact[kept].tolist(),
        "spacing": spacing[kept].tolist(),
        "added": added[kept].tolist(),
    }


def _rows_to_keep(spacing: Tensor) -> list[int]:
    """First and last row, both sides of every change of the spacing, and even steps between."""
    changes = torch.nonzero(spacing[1:] != spacing[:-1]).flatten().tolist()
    marks = {0, len(spacing) - 1, *changes, *(index + 1 for index in changes)}
    room = max(TRACE_ROWS - len(marks), 1)
    stride = -(-len(spacing) // room)
    return sorted(marks | set(range(0, len(spacing), stride)))


def autocast(dtype: str, seed: int, device: torch.device) -> dict[str, Any]:
    """Types of the toy model's parts in one training step under autocast."""
    precision = precision_named(dtype)
    if reason := why_unsupported(dtype, device):
        raise Unsupported(reason)
    torch.manual_seed(seed)
    components = observed_dtypes(ToyModel().to(device), precision.dtype, device)
    return {
        "device": device.type,
        "dtype": _dtype_name(precision.dtype),
        "components": [
            {"name": name, "dtype": _dtype_name(found)} for name, found in components.items()
        ],
    }


def layernorm(seed: int, device: torch.device) -> dict[str, Any]:
    """Variance and LayerNorm in every format at every scale, against float64."""
    generator = torch.Generator().manual_seed(seed)
    unit = torch.randn(TOKENS, FEATURES, generator=generator, dtype=torch.float64)
    cases = [(name, dtype, scale) for name, dtype in FORMATS.items() for scale in SCALES]
    return {
        "rows": [
            {"dtype": name, "scale": scale, **variance_row(unit * scale, dtype, device)}
            for name, dtype, scale in cases
        ],
        "layernorm_rows": [
            {
                "dtype": name,
                "scale": scale,
                "largest_error": output_error(unit * scale, dtype, device),
            }
            for name, dtype, scale in cases
        ],
    }


def variance(x: Tensor) -> Tensor:
    """Mean square of what is left without the mean: differences and squares in x's own format."""
    centred = x - x.mean(dim=-1, keepdim=True)
    return (centred * centred).mean(dim=-1)


def variance_row(x: Tensor, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """Each token's variance in one format: how it ends, and how far from the truth."""
    true = variance(x)
    computed = variance(x.to(device, dtype)).double().cpu()
    overflow = not bool(computed.isfinite().all())
    error = ((computed - true) / true).abs().max().item()
    return {
        "true_variance": true.mean().item(),
        "computed_variance": None if overflow else computed.mean().item(),
        "overflow": overflow,
        "underflow": bool((computed == 0).any()),
        "relative_error": None if overflow else error,
    }


def output_error(x: Tensor, dtype: torch.dtype, device: torch.device) -> float | None:
    """Largest deviation of LayerNorm's output from its float64 one; None if any is not finite."""
    expected = nn.functional.layer_norm(x, (FEATURES,))
    found = nn.functional.layer_norm(x.to(device, dtype), (FEATURES,)).double().cpu()
    error = (found - expected).abs().max()
    return error.item() if bool(error.isfinite()) else None


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
