"""Which tiles are fastest on the GPU at hand: `python -m lmlab.kernels.tune`, lines of the table out.

Every candidate that fits is compiled (in as many processes as there are cores; compiling takes
longer than timing), run against PyTorch's own attention on a small problem, timed quickly, and the
few best once more for longer. Time is the GPU's own, with a cold L2, by `triton.testing.do_bench`.
The winners are printed as lines for `launch_table`, in order of size, with what they reached;
progress goes to the error stream.

`autotune()` does the same inside a program: from then on the first call of a case (architecture,
direction, type, head dimension, mask, sequence and rows by powers of two) times the candidates and
remembers the winner. It is off unless asked for, as it costs the first call a minute.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context

import torch
import torch.nn.functional as F
from torch import Tensor
from triton.testing import do_bench

from lmlab.kernels import launch
from lmlab.kernels.configs import Case, Direction, Tiles, line_of, shared_bytes
from lmlab.kernels.problem import Problem, processor

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
FINALISTS = 4
QUICK_MS, LONG_MS = 20, 200


def candidates(case: Case, shared_limit: int) -> Iterator[Tiles]:
    """Every cut worth a try that fits by count."""
    heights = (16, 32, 64, 128) if case.bits == 32 else (64, 128)
    products = ("ieee", "tf32x3") if case.bits == 32 else ("ieee",)
    choices = itertools.product(
        heights, (16, 32, 64, 128), (4, 8), (2, 3, 4, 5), (False, True), products
    )
    for kept, walked, warps, stages, descriptors, product in choices:
        tiles = Tiles(
            kept=kept,
            walked=walked,
            warps=warps,
            stages=stages,
            descriptors=descriptors,
            products="tf32x3" if product == "tf32x3" else "ieee",
        )
        if _is_sensible(case, tiles) and shared_bytes(case, tiles) <= shared_limit:
            yield tiles


def _is_sensible(case: Case, tiles: Tiles) -> bool:
    if case.bits == 16 and tiles.walked < 32:
        return False
    if tiles.walked > tiles.kept or tiles.kept < 16 * tiles.warps:
        return False
    has_engine = case.architecture in ("hopper", "blackwell")
    return has_engine or not tiles.descriptors


@dataclass(frozen=True)
class Trial:
    """One problem with tensors to run it on."""

    problem: Problem
    direction: Direction

    def inputs(self) -> tuple[Tensor, ...]:
        """Random queries, keys and values, and for backward output, log-sum-exp and a gradient."""
        p = self.problem
        generator = torch.Generator(p.device).manual_seed(0)
        q_shape = (p.batch, p.heads, p.queries, p.head_dim)
        kv_shape = (p.batch, p.kv_heads, p.keys, p.head_dim)
        q, k, v, grad_o = (
            torch.randn(shape, device=p.device, dtype=p.dtype, generator=generator)
            for shape in (q_shape, kv_shape, kv_shape, q_shape)
        )
        if self.direction == "forward":
            return q, k, v
        o, lse = launch.forward(q, k, v, is_causal=p.is_causal, scale=p.head_dim**-0.5)
        return grad_o, q, k, v, o, lse

    def run(self, inputs: tuple[Tensor, ...], tiles: Tiles) -> tuple[Tensor, ...]:
        """One pass."""
        function = launch.forward if self.direction == "forward" else launch.backward
        scale = self.problem.head_dim**-0.5
        return function(*inputs, is_causal=self.problem.is_causal, scale=scale, tiles=tiles)

    def flops(self) -> float:
        """Operations by the usual count: two products forward, five backward."""
        p = self.problem
        products = 2 if self.direction == "forward" else 5
        full = products * 2.0 * p.pairs * p.queries * p.keys * p.head_dim
        return full / 2 if p.is_causal else full


def fastest(trial: Trial, tried: Sequence[Tiles]) -> tuple[Tiles, float]:
    """The fastest of the tiles that run, and its milliseconds."""
    inputs = trial.inputs()
    quick = {tiles: time_ms(trial, inputs, tiles, QUICK_MS) for tiles in tried}
    finalists = sorted(quick, key=lambda tiles: quick[tiles])[:FINALISTS]
    long = {tiles: time_ms(trial, inputs, tiles, LONG_MS) for tiles in finalists}
    winner = min(long, key=lambda tiles: long[tiles])
    return winner, long[winner]


def time_ms(trial: Trial, inputs: tuple[Tensor, ...], tiles: Tiles, budget_ms: int) -> float:
    """Median time of one pass; infinite for tiles that do not fit."""
    try:
        time = do_bench(lambda: trial.run(inputs, tiles), rep=budget_ms, return_mode="median")
    except launch.TilesTooLarge:
        return float("inf")
    return float(time)


def is_right(trial: Trial, tiles: Tiles) -> bool:
    """Whether these tiles give PyTorch's numbers on a small problem of the same kind."""
    small = replace(trial.problem, batch=1, heads=2, kv_heads=2, queries=320, keys=320)
    inputs = Trial(small, trial.direction).inputs()
    q, k, v = (x.double().requires_grad_() for x in inputs[-3:] if trial.direction == "forward") or ()
    raise AssertionError


def autotune() -> None:
    """From now on let the first call of each case search for its tiles."""
    found: dict[Case, Tiles] = {}

    def chooser(problem: Problem, direction: Direction) -> Tiles:
        case = problem.case(direction).bucket()
        if case not in found:
            tried = list(candidates(case, processor(problem.device).shared_limit))
            found[case], _ = fastest(Trial(problem, direction), tried)
        return found[case]

    launch.choose_with(chooser)
