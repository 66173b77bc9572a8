"""Which tiles are fastest on the GPU at hand: `python -m lmlab.kernels.tune`.

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
import contextlib
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
TOLERANCE = {16: 5e-2, 32: 1e-4}
"""Largest error of outputs and gradients of order one, by bits of the type."""


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
    """Whether these tiles give the numbers of PyTorch in fp64, on a small problem of the kind."""
    small = Trial(
        replace(trial.problem, batch=1, heads=2, kv_heads=2, queries=320, keys=320),
        trial.direction,
    )
    inputs = small.inputs()
    ours = small.run(inputs, tiles)
    first = 0 if trial.direction == "forward" else 1
    q, k, v = wide = [x.double().requires_grad_() for x in inputs[first : first + 3]]
    o = F.scaled_dot_product_attention(q, k, v, is_causal=trial.problem.is_causal)
    expected = (o,) if trial.direction == "forward" else torch.autograd.grad(o, wide, inputs[0])
    tolerance = TOLERANCE[8 * trial.problem.dtype.itemsize]
    return all(
        bool((our - right).abs().max() <= tolerance)
        for our, right in zip(ours, expected, strict=False)
    )


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


def tune(trial: Trial, jobs: int) -> str:
    """The line of the table for one problem, and a comment with what was reached."""
    case = trial.problem.case(trial.direction).bucket()
    tried = list(candidates(case, processor(trial.problem.device).shared_limit))
    print(f"{case}: {len(tried)} candidates", file=sys.stderr, flush=True)
    compile_all(trial, tried, jobs)
    winner, ms = fastest(trial, [tiles for tiles in tried if is_right(trial, tiles)])
    rate = trial.flops() / ms / 1e9
    return f"{line_of(case, winner)}\n# ^ {ms:.3f} ms, {rate:.0f} TFLOP/s"


def compile_all(trial: Trial, tried: Sequence[Tiles], jobs: int) -> None:
    """Fill Triton's cache on disk; tiles that do not fit are found out later."""
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        list(pool.map(_compile, itertools.repeat(trial), tried))


def _compile(trial: Trial, tiles: Tiles) -> None:
    # Few heads: what is compiled depends on the tiles and on which sizes divide by 16.
    one = Trial(replace(trial.problem, batch=1, heads=1, kv_heads=1), trial.direction)
    with contextlib.suppress(launch.TilesTooLarge):
        one.run(one.inputs(), tiles)


def main(arguments: Sequence[str] | None = None) -> int:
    """Tune the problems asked for and print their lines."""
    parser = argparse.ArgumentParser(prog="lmlab.kernels.tune", description=__doc__.split("\n")[0])
    parser.add_argument("--head-dim", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--sequence", type=int, nargs="+", default=[16384])
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--direction", nargs="+", choices=("forward", "backward"), default=None)
    parser.add_argument("--full", action="store_true", help="without a causal mask")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        parser.error("a CUDA GPU is needed; on a CPU kernels are interpreted, not timed")
    device = torch.device("cuda", torch.cuda.current_device())
    directions = options.direction or ("forward", "backward")
    shapes = itertools.product(options.head_dim, options.sequence, directions)
    for head_dim, sequence, direction in shapes:
        problem = Problem(
            device=device,
            dtype=DTYPES[options.dtype],
            batch=options.batch,
            heads=options.heads,
            kv_heads=options.heads,
            queries=sequence,
            keys=sequence,
            head_dim=head_dim,
            is_causal=not options.full,
            tf32=False,
        )
        print(tune(Trial(problem, direction), options.jobs), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
