"""Precision: four small experiments on what number formats keep and lose.

A float has a fixed number of significant bits, so the spacing of floats grows with their size: near
8, fp16 steps by 1/128. Each topic shows one consequence:

- `formats`: bits of exponent and mantissa, range and spacing of each format, and where a sum stops
  growing because its terms are at most half the spacing. Records per dtype: `exponent_bits`,
  `mantissa_bits`, `largest_power` and `smallest_power` (normal numbers lie between these powers
  of two), `spacing` (at 1), `stalls_at` per term.
  `data.stalled_sums` follows a sum of ones in each format.
- `accumulation`: a growing sum swallows its terms. Records: `sum` and `error` per loop, and
  `term_in_fp16`; `data.fp16_trace` follows the fp16 sum.
- `autocast`: matmuls can run in 16 bits, sums should not. Records: `dtype_of` per component of a
  toy model, as seen by hooks.
- `layernorm`: its variance sums squares, and squaring doubles the exponent. Records per dtype and
  scale: `variance_error` (relative, largest over tokens) with statistics summed in fp32, as PyTorch
  does, and in the format itself; `true_variance`; `output_error` of PyTorch's LayerNorm and, with
  the label `sums`, of one whose statistics are summed in the format itself. Overflow and underflow
  have the status `unsupported`; `reason` says which of the two.
"""

import math
from collections.abc import Mapping
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lmlab.jobs.outcome import Outcome, Unsupported
from lmlab.measure.precision import precision_named, why_unsupported
from lmlab.measure.records import Record, value, values, without_value
from lmlab.study.points import Point

TRACE_STEPS = 500
FORMATS = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
# Powers of four: fp16's squares vanish at the lower end and overflow at the upper one.
SCALES = tuple(4.0**power for power in range(-7, 7))
TOKENS, FEATURES = 64, 768
ONES = 4096
EPSILON = 1e-5
IN_FEATURES, HIDDEN, OUT_FEATURES, BATCH = 20, 10, 5, 8
"""Of the toy model that autocast runs."""
OWN = "own format"


def measure(point: Point, device: torch.device) -> Outcome:
    """Run the experiment that the point's topic names."""
    settings, topic = point.settings, point.parameters["topic"]
    if topic == "formats":
        return formats(settings["term"])
    if topic == "accumulation":
        return accumulation(settings["terms"], settings["term"])
    if topic == "autocast":
        return autocast(str(point.parameters["dtype"]), settings["seed"], device)
    return Outcome(measurements=layernorm(settings["seed"], device))


def formats(term: float) -> Outcome:
    """Bits, range and spacing of every format, and the sums that stall in it."""
    records, sums = [], {}
    for name, dtype in FORMATS.items():
        info = torch.finfo(dtype)
        mantissa = round(-math.log2(info.eps))
        numbers = {
            "exponent_bits": info.bits - 1 - mantissa,
            "mantissa_bits": mantissa,
            "largest_power": math.ceil(math.log2(info.max)),
            "smallest_power": round(math.log2(info.smallest_normal)),
            "spacing": info.eps,
        }
        records += values(numbers, dtype=name)
        for added in dict.fromkeys((1.0, term)):
            labels = {"dtype": name, "term": added}
            records.append(_finite("stalls_at", stalls_at(dtype, added), labels))
        sums[name] = running_sums(dtype, torch.ones((), dtype=dtype), ONES)
    return Outcome(measurements=records, data={"stalled_sums": followed(sums)})


def stalls_at(dtype: torch.dtype, term: float) -> float:
    """The first power of two at which adding the term changes nothing. Spacing is constant between
    powers of two, so that is where a running sum stalls."""
    total, added = torch.ones((), dtype=dtype), torch.tensor(term, dtype=dtype)
    while total + added != total:
        total = total * 2
    return total.item()


def accumulation(terms: int, term: float) -> Outcome:
    """Four loops on CPU tensors: one rounding per addition, the same on every machine."""
    fp32, fp16 = torch.float32, torch.float16
    if terms * term > torch.finfo(fp16).max:
        raise Unsupported(
            f"terms x term = {terms * term:g}; fp16 ends at {torch.finfo(fp16).max:g}"
        )
    narrow, wide = (torch.tensor(term, dtype=dtype) for dtype in (fp16, fp32))
    sums = {
        "fp32 += fp32": running_sums(fp32, wide, terms),
        "fp16 += fp16": running_sums(fp16, narrow, terms),
        "fp32 += fp16": running_sums(fp32, narrow, terms),
        "fp32 += fp16 cast up": running_sums(fp32, narrow.to(fp32), terms),
    }
    records = [value("term_in_fp16", narrow.item(), "")]
    for loop, running in sums.items():
        result = running[-1].item()
        records += values({"sum": result, "error": result - terms * term}, loop=loop)
    trace = followed({"sum": sums["fp16 += fp16"]})
    return Outcome(measurements=records, data={"fp16_trace": trace})


def running_sums(accumulator: torch.dtype, term: Tensor, terms: int) -> Tensor:
    """The sum after each addition of the term, in the accumulator's format."""
    total = torch.tensor(0.0, dtype=accumulator)
    sums = torch.empty(terms, dtype=accumulator)
    for step in range(terms):
        total += term
        sums[step] = total
    return sums


def followed(sums: Mapping[str, Tensor]) -> dict[str, list[float]]:
    """Sample running sums at evenly spaced steps, including the first and the last."""
    terms = len(next(iter(sums.values())))
    steps = np.linspace(1, terms, min(terms, TRACE_STEPS), dtype=int)
    return {"step": steps.tolist(), **{name: s[steps - 1].tolist() for name, s in sums.items()}}


def autocast(dtype: str, seed: int, device: torch.device) -> Outcome:
    """Dtypes of the toy model's parts in one training step under autocast."""
    if reason := why_unsupported(dtype, device):
        raise Unsupported(reason)
    torch.manual_seed(seed)
    found = observed_dtypes(toy_model().to(device), precision_named(dtype).dtype, device)
    names = {part: str(dtype).removeprefix("torch.") for part, dtype in found.items()}
    records = [value("dtype_of", name, "", component=part) for part, name in names.items()]
    return Outcome(measurements=records)


def toy_model() -> nn.Sequential:
    """fc1 -> ReLU -> LayerNorm -> fc2."""
    fc1 = nn.Linear(IN_FEATURES, HIDDEN, bias=False)
    fc2 = nn.Linear(HIDDEN, OUT_FEATURES, bias=False)
    return nn.Sequential(fc1, nn.ReLU(), nn.LayerNorm(HIDDEN), fc2)


def observed_dtypes(
    model: nn.Sequential, dtype: torch.dtype, device: torch.device
) -> dict[str, torch.dtype]:
    """Dtypes seen in one forward and backward pass under autocast, by component. Autocast chooses
    a dtype per operation at run time, so hooks read it from each module's output."""
    seen: dict[str, torch.dtype] = {}
    fc1, _, norm, fc2 = model
    watched = {"fc1_output": fc1, "layernorm_output": norm, "logits": fc2}
    for name, module in watched.items():
        module.register_forward_hook(
            lambda _module, _inputs, output, name=name: seen.update({name: output.dtype})
        )
    inputs = torch.randn(BATCH, IN_FEATURES, device=device)
    targets = torch.randint(OUT_FEATURES, (BATCH,), device=device)
    with torch.autocast(device.type, dtype=dtype):
        if not torch.is_autocast_enabled(device.type):  # it only warns
            raise Unsupported(f"autocast on this {device.type} does not support {dtype}")
        (parameters,) = {parameter.dtype for parameter in model.parameters()}
        loss = nn.functional.cross_entropy(model(inputs), targets)
    loss.backward()
    (gradients,) = {p.grad.dtype for p in model.parameters() if p.grad is not None}
    return {"parameters": parameters, **seen, "loss": loss.dtype, "gradients": gradients}


def layernorm(seed: int, device: torch.device) -> list[Record]:
    """Variance and LayerNorm in every format at every scale, against float64."""
    generator = torch.Generator().manual_seed(seed)
    unit = torch.randn(TOKENS, FEATURES, generator=generator, dtype=torch.float64)
    records = []
    for (name, dtype), scale in product(FORMATS.items(), SCALES):
        x, labels = unit * scale, {"dtype": name, "scale": scale}
        rounded = x.to(device, dtype)
        for sums, computed in (("fp32", variance(rounded)), (OWN, _moments_in_format(rounded)[1])):
            records += variance_records(variance(x), computed, {**labels, "sums": sums})
        for norm, more in ((layer_norm, {}), (layer_norm_summed_in_format, {"sums": OWN})):
            # LayerNorm's values are about one, so this is close to a relative error.
            error = (norm(rounded).double().cpu() - layer_norm(x)).abs().max().item()
            records.append(_finite("output_error", error, {**labels, **more}))
    return records


def variance(x: Tensor) -> Tensor:
    """Variance in x's own format, with PyTorch's reductions, which accumulate in fp32."""
    centered = x - x.mean(dim=-1, keepdim=True)
    return (centered * centered).mean(dim=-1)


def _moments_in_format(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance with every partial sum rounded to x's own format."""
    mean = _sum_in_format(x) / x.shape[-1]
    centered = x - mean.unsqueeze(-1)
    return mean, _sum_in_format(centered * centered) / x.shape[-1]


def _sum_in_format(x: Tensor) -> Tensor:
    total = torch.zeros_like(x[..., 0])
    for column in x.unbind(-1):
        total = total + column
    return total


def variance_records(true: Tensor, computed: Tensor, labels: Mapping[str, Any]) -> list[Record]:
    """The largest relative error of the tokens' variances, or overflow or underflow."""
    computed = computed.double().cpu()
    error = ((computed - true) / true).abs().max().item()
    if bool((computed == 0).any()):
        found = without_value("variance_error", "unsupported", "underflow", **labels)
    else:
        found = _finite("variance_error", error, labels)
    return [found, value("true_variance", true.mean().item(), "", **labels)]


def _finite(name: str, number: float, labels: Mapping[str, Any]) -> Record:
    if math.isfinite(number):
        return value(name, number, "", **labels)
    return without_value(name, "unsupported", "overflow", **labels)


def layer_norm(x: Tensor) -> Tensor:
    """PyTorch's LayerNorm, which computes its statistics in fp32."""
    return nn.functional.layer_norm(x, (FEATURES,), eps=EPSILON)


def layer_norm_summed_in_format(x: Tensor) -> Tensor:
    """LayerNorm as its formula reads, with mean and variance accumulated in x's own format."""
    mean, variance = (each.unsqueeze(-1) for each in _moments_in_format(x))
    return (x - mean) / torch.sqrt(variance + EPSILON)
