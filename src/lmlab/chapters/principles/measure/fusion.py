"""Operator fusion: a chain of elementwise operations as one kernel.

Each operation of eager PyTorch is a kernel that reads its inputs from memory and writes its result
back. Fused, the chain reads and writes once, whether torch.compile generates the kernel or we write
it. Two chains: RMSNorm, and bias + GELU + dropout + residual. Bytes are those that a fused kernel
must move: inputs read once, results written once.

Dropout draws other random numbers in each program, so an element is right if it is either kept or
dropped, and the share of those dropped must be the asked one.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lmlab.chapters.attention.measure.compiling import compiler
from lmlab.chapters.principles.measure.programs import (
    INTERPRETED,
    Program,
    compare,
    random,
    relative_error,
)
from lmlab.jobs.outcome import Outcome
from lmlab.kernels.principles_fusion import gelu_dropout_residual, rms_norm
from lmlab.study.points import Point

P = 0.1
WITHIN = 2e-2
EPS = 1e-5
CLEAR = 0.1
SERIES = {"eager": "without", "compiled": "library", "ours": "with"}
Call = Callable[[], Tensor]


def eager_norm(x: Tensor, weight: Tensor) -> Tensor:
    """As the model's RMSNorm."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS) * weight).to(x.dtype)


def eager_chain(x: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
    """Four operations."""
    return residual + F.dropout(F.gelu(x + bias, approximate="tanh"), P)


def measure(point: Point, device: torch.device) -> Outcome:
    """Both chains: eager, compiled at the last shape where the study compiles, and ours."""
    asked = {**point.settings, **point.parameters}
    torch.manual_seed(asked["seed"])
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    make = partial(random, device=device, dtype=dtype)
    programs: dict[str, Program] = {}
    with compiler() if asked["compile"] else nullcontext():
        for columns in asked["columns"]:
            x, residual = make(asked["rows"], columns), make(asked["rows"], columns)
            weight, bias = make(columns), make(columns)
            last = columns == max(asked["columns"])
            compiles = last and asked["compile"]
            norm = variants(eager_norm, compiles, x, weight)
            norm["ours"] = partial(rms_norm, x, weight, EPS)
            chain = variants(eager_chain, compiles, x, bias, residual)
            chain["ours"] = partial(
                gelu_dropout_residual, x, bias, residual, p=P, seed=asked["seed"]
            )
            checked = partial(norm_error, x, weight), partial(chain_error, x, bias, residual)
            for name, calls, error, passes in (
                ("RMSNorm", norm, checked[0], 2),
                ("GELU chain", chain, checked[1], 3),
            ):
                for kind, call in calls.items():
                    series = SERIES[kind]
                    quoted = last and name == "GELU chain" and series in ("with", "without")
                    programs[f"{name}, {columns}, {kind}"] = Program(
                        call=call,
                        check=partial(error, call),
                        within=WITHIN,
                        series=series,
                        pair=series if quoted else "",
                        x=columns,
                        unsupported=INTERPRETED if kind == "ours" and device.type == "cpu" else "",
                        numbers={"bytes": (passes * x.numel() * x.element_size(), "B")},
                    )
        return compare(programs, asked, device)


def variants(function: Any, compiles: bool, *arguments: Tensor) -> dict[str, Call]:
    """The function as it is, and compiled for these shapes."""
    calls: dict[str, Call] = {"eager": partial(function, *arguments)}
    if compiles:
        compiled = torch.compile(function, fullgraph=True, dynamic=False)
        calls["compiled"] = partial(compiled, *arguments)
    return calls


def norm_error(x: Tensor, weight: Tensor, call: Call) -> float:
    """Against float64."""
    return relative_error(call(), eager_norm(x.double(), weight.double()))


def chain_error(x: Tensor, bias: Tensor, residual: Tensor, call: Call) -> float:
    """Distance to the nearer of kept and dropped, or the error of the share dropped."""
    found, base = call().double(), residual.double()
    gelu = F.gelu(x.double() + bias.double(), approximate="tanh") / (1 - P)
    dropped = (found - base).abs() < (found - base - gelu).abs()
    error = relative_error(torch.where(dropped, found, found - gelu), base)
    clear = gelu.abs() > CLEAR  # of the others both look alike
    return max(error, abs(dropped[clear].double().mean().item() - P))
