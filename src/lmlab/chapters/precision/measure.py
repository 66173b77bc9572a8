"""Precision: three small experiments on what number formats keep and lose.

A float has a fixed number of significant bits, so the spacing of floats grows with their size: near
8, fp16 steps by 1/128. Three consequences, one per topic:

- `accumulation`: a growing sum swallows its terms. Records: `sum`, `exact` and `error` per loop;
  `data.fp16_trace` follows the fp16 sum (step, sum, spacing to the next float, what was added).
- `autocast`: so matmuls may be 16 bit, but sums should not. Records: `dtype_of` per component of a
  toy model, as hooks see it.
- `layernorm`: its variance sums squares, and squaring doubles the exponent. Records per dtype and
  scale: `variance_error` (relative, largest over tokens) with statistics summed in fp32, as PyTorch
  does, and in the format itself; `variance` true and computed; `output_error` of `nn.LayerNorm`.
  Overflow and underflow have the status `unsupported`, with `reason` naming which.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from lmlab.chapters.precision.toy_model import ToyModel, observed_dtypes
from lmlab.jobs.outcome import Outcome, Unsupported
from lmlab.measure.precision import precision_named, why_unsupported
from lmlab.measure.records import Record, value, without_value
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
        return accumulation(settings["terms"], settings["term"])
    if topic == "autocast":
        return autocast(str(parameters["dtype"]), settings["seed"], device)
    if topic == "layernorm":
        return Outcome(measurements=layernorm(settings["seed"], device))
    raise ValueError(f"topic = {topic!r}; allowed: accumulation, autocast, layernorm")


def accumulation(terms: int, term: float) -> Outcome:
    """Four loops on CPU tensors: one rounding per addition, the same on every machine."""
    fp32, fp16 = torch.float32, torch.float16
    if terms * term > torch.finfo(fp16).max:
        raise Unsupported(
            f"terms x term = {terms * term:g}; fp16 ends at {torch.finfo(fp16).max:g}"
        )
    loops = {
        "fp32 += fp32": (fp32, torch.tensor(term, dtype=fp32)),
        "fp16 += fp16": (fp16, torch.tensor(term, dtype=fp16)),
        "fp32 += fp16": (fp32, torch.tensor(term, dtype=fp16)),
        "fp32 += fp16 cast up": (fp32, torch.tensor(term, dtype=fp16).to(fp32)),
    }
    records = [value("term_in_fp16", torch.tensor(term, dtype=fp16).item(), "")]
    for loop, (accumulator, added) in loops.items():
        result = running_sums(accumulator, added, terms)[-1].item()
        records += [
            value("sum", result, "", loop=loop),
            value("error", result - terms * term, "", loop=loop),
        ]
    sums = running_sums(fp16, torch.tensor(term, dtype=fp16), terms)
    return Outcome(measurements=records, data={"fp16_trace": trace(sums)})


def running_sums(accumulator: torch.dtype, term: Tensor, terms: int) -> Tensor:
    """The sum after each addition of the term, in the accumulator's format."""
    total = torch.tensor(0.0, dtype=accumulator)
    sums = torch.empty(terms, dtype=accumulator)
    for step in range(terms):
        total += term
        sums[step] = total
    return sums


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


def autocast(dtype: str, seed: int, device: torch.device) -> Outcome:
    """Dtypes of the toy model's parts in one training step under autocast."""
    precision = precision_named(dtype)
    if reason := why_unsupported(dtype, device):
        raise Unsupported(reason)
    torch.manual_seed(seed)
    components = observed_dtypes(ToyModel().to(device), precision.dtype, device)
    return Outcome(
        measurements=[
            value("dtype_of", _dtype_name(found), "", component=name)
            for name, found in components.items()
        ]
    )


def layernorm(seed: int, device: torch.device) -> list[Record]:
    """Variance and LayerNorm in every format at every scale, against float64."""
    generator = torch.Generator().manual_seed(seed)
    unit = torch.randn(TOKENS, FEATURES, generator=generator, dtype=torch.float64)
    records = []
    for (name, dtype), scale in product(FORMATS.items(), SCALES):
        x, labels = unit * scale, {"dtype": name, "scale": scale}
        for sums, variance_in in (("fp32", variance), ("own format", variance_summed_in_format)):
            records += variance_records(x, dtype, device, variance_in, {**labels, "sums": sums})
        records.append(
            _finite_or("output_error", output_error(x, dtype, device), "not finite", labels)
        )
    return records


def variance(x: Tensor) -> Tensor:
    """Mean square around the mean: differences and squares in x's own format, sums as PyTorch
    takes them, in fp32."""
    centered = x - x.mean(dim=-1, keepdim=True)
    return (centered * centered).mean(dim=-1)


def variance_summed_in_format(x: Tensor) -> Tensor:
    """The same with every partial sum rounded to x's own format."""
    mean = _sum_in_format(x) / x.shape[-1]
    centered = x - mean.unsqueeze(-1)
    return _sum_in_format(centered * centered) / x.shape[-1]


def _sum_in_format(x: Tensor) -> Tensor:
    total = torch.zeros_like(x[..., 0])
    for column in x.unbind(-1):
        total = total + column
    return total


def variance_records(
    x: Tensor,
    dtype: torch.dtype,
    device: torch.device,
    variance_in: Callable[[Tensor], Tensor],
    labels: Mapping[str, Any],
) -> list[Record]:
    """Each token's variance in one format: how far from the truth, or how it ends."""
    true = variance(x)
    computed = variance_in(x.to(device, dtype)).double().cpu()
    error = ((computed - true) / true).abs().max().item()
    if bool((computed == 0).any()):
        found = without_value("variance_error", "unsupported", "underflow", **labels)
    else:
        found = _finite_or("variance_error", error, "overflow", labels)
    return [found, value("true_variance", true.mean().item(), "", **labels)]


def _finite_or(name: str, number: float, reason: str, labels: Mapping[str, Any]) -> Record:
    if math.isfinite(number):
        return value(name, number, "", **labels)
    return without_value(name, "unsupported", reason, **labels)


def output_error(x: Tensor, dtype: torch.dtype, device: torch.device) -> float:
    """Largest deviation of LayerNorm's output from its float64 one."""
    expected = nn.functional.layer_norm(x, (FEATURES,))
    found = nn.functional.layer_norm(x.to(device, dtype), (FEATURES,)).double().cpu()
    return (found - expected).abs().max().item()


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
