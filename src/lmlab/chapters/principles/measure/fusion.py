"""Operator fusion: a chain of elementwise operations as one kernel.

Each operation of eager PyTorch is a kernel that reads its inputs from memory and writes its result
back. Fused, the chain reads and writes once, whether torch.compile generates the kernel or we write
it. Two chains: RMSNorm, and bias + GELU + dropout + residual. Bytes are those that a fused kernel
must move: inputs read once, results written once.

Dropout draws different random numbers in each program, so an element is correct if it matches the
kept or the dropped value, and the dropped share must match the dropout probability.
"""

from contextlib import nullcontext
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from lmlab.chapters.attention.measure.compiling import compiler
from lmlab.chapters.principles.measure.programs import (
    INTERPRETED,
    Program,
    asked_of,
    compare,
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
PASSES = {"RMSNorm": 2, "GELU chain": 3}
"""How often a fused kernel reads or writes the matrix, or one like it."""


def eager_norm(x: Tensor, weight: Tensor) -> Tensor:
    """RMSNorm as in the model."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS) * weight).to(x.dtype)


def eager_chain(x: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
    """Bias, GELU, dropout and residual, each an operation of its own."""
    return residual + F.dropout(F.gelu(x + bias, approximate="tanh"), P)


def measure(point: Point, device: torch.device) -> Outcome:
    """Both chains: eager, ours, and, if the study compiles, compiled at the largest width."""
    asked = asked_of(point)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    make = partial(torch.randn, device=device, dtype=dtype)
    programs: dict[str, Program] = {}
    with compiler() if asked["compile"] else nullcontext():
        for columns in asked["columns"]:
            last = columns == max(asked["columns"])
            x, residual = make(asked["rows"], columns), make(asked["rows"], columns)
            weight, bias = make(columns), make(columns)
            ours = partial(gelu_dropout_residual, p=P, seed=asked["seed"])
            for name, eager, own, inputs, error in (
                ("RMSNorm", eager_norm, partial(rms_norm, eps=EPS), (x, weight), norm_error),
                ("GELU chain", eager_chain, ours, (x, bias, residual), chain_error),
            ):
                functions = {"eager": eager}
                if last and asked["compile"]:
                    functions["compiled"] = torch.compile(eager, fullgraph=True, dynamic=False)
                functions["ours"] = own
                for kind, function in functions.items():
                    series = SERIES[kind]
                    quoted = last and name == "GELU chain" and kind != "compiled"
                    programs[f"{name}, {columns}, {kind}"] = Program(
                        call=partial(function, *inputs),
                        error=partial(error, *inputs),
                        within=WITHIN,
                        series=series,
                        x=columns,
                        pair=series if quoted else "",
                        unsupported=INTERPRETED if kind == "ours" and device.type == "cpu" else "",
                        numbers={"bytes": PASSES[name] * x.nbytes},
                    )
        return compare(programs, asked, device).outcome()


def norm_error(x: Tensor, weight: Tensor, found: Tensor) -> float:
    """Relative error against float64."""
    return relative_error(found, eager_norm(x.double(), weight.double()))


def chain_error(x: Tensor, bias: Tensor, residual: Tensor, found: Tensor) -> float:
    """The larger of two errors: to the nearer of kept and dropped, and of the dropped share."""
    found, base = found.double(), residual.double()
    gelu = F.gelu(x.double() + bias.double(), approximate="tanh") / (1 - P)
    dropped = (found - base).abs() < (found - base - gelu).abs()
    error = relative_error(torch.where(dropped, found, found - gelu), base)
    clear = gelu.abs() > CLEAR  # near zero, kept and dropped look alike
    return max(error, abs(dropped[clear].double().mean().item() - P))
