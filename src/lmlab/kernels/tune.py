"""Find the fastest tiles on the GPU at hand: `python -m lmlab.kernels.tune`.

Every candidate that fits is compiled (in parallel; compiling takes longer than timing), checked
against PyTorch's attention on a small problem, timed briefly, and the best few again for longer.
Times are GPU times with a cold L2, by `triton.testing.do_bench`. The winners are printed as rows
for `tile_sizes`, with the throughput they reached; progress goes to stderr.

`autotune()` does the same inside a program: the first call of each case (sizes rounded to powers of
two) then times the candidates and keeps the winner. It is off by default, because it makes the
first call take a minute.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing import TimeoutError, get_context
from multiprocessing.pool import AsyncResult

import torch
import torch.nn.functional as F
from torch import Tensor
from triton.testing import do_bench

from lmlab.kernels import launch
from lmlab.kernels.configs import Case, Direction, Fp32Dot, Tiles, format_row, orient, shared_bytes
from lmlab.kernels.problem import Problem, device_info

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
NEEDS_A_GPU = "a CUDA GPU is needed; on a CPU kernels are interpreted, not timed"
FINALISTS = 4
QUICK_MS, LONG_MS = 20, 200
SHORT = 2048
"""Queries and keys up to which saving a launch may be worth reading O again."""
TIMEOUT_S = 120.0
"""A candidate that has not finished by then hangs."""
TOLERANCE = {16: 5e-2, 32: 1e-4}
"""Largest error of outputs and gradients of order one, by bits of the type."""


def candidates(case: Case, shared_limit: int) -> Iterator[Tiles]:
    """All tiles worth trying that fit by estimate."""
    tried = _portable(case)
    if case.architecture == "hopper" and case.bits == 16:
        tried = itertools.chain(tried, _warp_specialized(case))
    return (tiles for tiles in tried if shared_bytes(case, tiles) <= shared_limit)


def _portable(case: Case) -> Iterator[Tiles]:
    is_short = case.sequence <= SHORT
    resident = [32, 64, 128] if case.bits == 16 else [16, 32, 64, 128]
    streamed = [32, 64, 128] if case.bits == 16 else [16, 32, 64]
    stages = [2, 3, 4, 5] if case.bits == 16 else [1, 2, 3]
    dots: tuple[Fp32Dot, ...] = ("ieee",) if case.bits == 16 else ("ieee", "tf32x3")
    if case.bits == 32 and case.direction == "backward":
        dots = (*dots, "bf16x6")
    choices = itertools.product(
        resident if is_short else resident[1:], streamed, (4, 8), stages, (False, True), dots
    )
    for resident_rows, streamed_rows, warps, depth, tma, dot in choices:
        m, n = orient(case.direction, resident_rows, streamed_rows)
        tiles = Tiles(block_m=m, block_n=n, warps=warps, stages=depth, tma=tma, fp32_dot=dot)
        if not _is_sensible(case, tiles):
            continue
        yield tiles
        if case.direction == "backward" and is_short and tiles.terms == 1:
            yield replace(tiles, inline_delta=True)


def _is_sensible(case: Case, tiles: Tiles) -> bool:
    resident, streamed = tiles.rows(case.direction)
    # A short sequence needs many programs: smaller tiles, which may stream more than they keep.
    widest, least = (2, 8) if case.sequence <= SHORT else (1, 16)
    if streamed > widest * resident or (case.bits == 16 and resident < least * tiles.warps):
        return False
    has_tma = case.architecture in ("hopper", "blackwell")
    return not tiles.tma or (has_tma and (case.bits == 16 or tiles.terms > 1))


def _warp_specialized(case: Case) -> Iterator[Tiles]:
    """Tiles for the Hopper kernels, as far as registers suffice."""
    is_forward, is_wide = case.direction == "forward", case.head_dim > 128
    if is_wide and not is_forward:
        return
    resident = [128, 192] if is_forward and case.head_dim <= 64 else [128]
    streamed = [64] if is_wide else [64, 128] if is_forward else [32, 64]
    for resident_rows, streamed_rows, stages in itertools.product(resident, streamed, (2, 3, 4)):
        m, n = orient(case.direction, resident_rows, streamed_rows)
        tiles = Tiles(block_m=m, block_n=n, warps=8, stages=stages, warp_specialized=True)
        yield tiles
        if not is_forward and case.head_dim in (64, 128) and streamed_rows == 64:
            yield replace(tiles, fused=True)


@dataclass(frozen=True)
class Trial:
    """One direction of one problem, to run with any tiles."""

    problem: Problem
    direction: Direction

    def inputs(self) -> tuple[Tensor, ...]:
        """Random q, k and v; for the backward grad_o, q, k, v, o and lse."""
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
        """FLOPs by the usual count: two products forward, five backward."""
        p = self.problem
        products = 2 if self.direction == "forward" else 5
        full = products * 2.0 * p.batch_heads * p.queries * p.keys * p.head_dim
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
    if trial.problem.device.type != "cuda":
        raise ValueError(NEEDS_A_GPU)
    try:
        time = do_bench(lambda: trial.run(inputs, tiles), rep=budget_ms, return_mode="median")
    except launch.TilesTooLarge:
        return float("inf")
    return float(time)


def is_correct(trial: Trial, tiles: Tiles) -> bool:
    """Whether these tiles match PyTorch in fp64, on a small problem of the same kind."""
    # Whole tiles: without a mask the fused backward would otherwise not be the kernel that runs.
    small = replace(trial.problem, batch=1, heads=2, kv_heads=2, queries=384, keys=384)
    inputs = Trial(small, trial.direction).inputs()
    found = Trial(small, trial.direction).run(inputs, tiles)
    first = 0 if trial.direction == "forward" else 1
    q, k, v = wide = [x.double().requires_grad_() for x in inputs[first : first + 3]]
    o = F.scaled_dot_product_attention(q, k, v, is_causal=small.is_causal)
    expected = (o,) if trial.direction == "forward" else torch.autograd.grad(o, wide, inputs[0])
    tolerance = TOLERANCE[8 * small.dtype.itemsize]
    errors = [(x - y).abs().max() for x, y in zip(found, expected, strict=False)]
    return all(bool(error <= tolerance) for error in errors)


def autotune() -> None:
    """From now on let the first call of each case search for its tiles."""
    found: dict[Case, Tiles] = {}

    def chooser(problem: Problem, direction: Direction) -> Tiles:
        case = problem.case(direction).bucket()
        if case not in found:
            tried = list(candidates(case, device_info(problem.device).shared_limit))
            found[case], _ = fastest(Trial(problem, direction), tried)
        return found[case]

    launch.choose_with(chooser)


def tune(trial: Trial, jobs: int) -> str:
    """The row of the table for one problem, and a comment with the throughput."""
    case = trial.problem.case(trial.direction).bucket()
    tried = list(candidates(case, device_info(trial.problem.device).shared_limit))
    usable = compile_and_check(trial, tried, jobs)
    print(f"{case}: {len(usable)} of {len(tried)} usable", file=sys.stderr, flush=True)
    if not usable:
        return f"# {case}: none of {len(tried)} candidates fits and is correct"
    winner, ms = fastest(trial, usable)
    return f"{format_row(case, winner)}\n# ^ {ms:.3f} ms, {trial.flops() / ms / 1e9:.0f} TFLOP/s"


def compile_and_check(trial: Trial, tried: Sequence[Tiles], jobs: int) -> list[Tiles]:
    """The tiles that fit and are correct; compiled kernels stay in Triton's cache on disk.

    Each runs in another process, so that a hanging one can be abandoned.
    """
    with get_context("spawn").Pool(jobs) as pool:
        answers = [pool.apply_async(is_usable, (trial, tiles)) for tiles in tried]
        return [tiles for tiles, answer in zip(tried, answers, strict=True) if _is_yes(answer)]


def _is_yes(answer: AsyncResult[bool]) -> bool:
    try:
        return answer.get(TIMEOUT_S)
    except TimeoutError:
        return False


def is_usable(trial: Trial, tiles: Tiles) -> bool:
    """Whether the problem itself runs with these tiles and the check passes."""
    try:
        trial.run(trial.inputs(), tiles)
    except launch.TilesTooLarge:
        return False
    return is_correct(trial, tiles)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a positive integer, got {text!r}")
    return int(text)


def main(arguments: Sequence[str] | None = None) -> int:
    """Tune the requested problems and print their rows."""
    parser = argparse.ArgumentParser(prog="lmlab.kernels.tune", description=__doc__.split("\n")[0])
    parser.add_argument("--head-dim", type=_positive, nargs="+", default=[64, 128])
    parser.add_argument("--sequence", type=_positive, nargs="+", default=[16384])
    parser.add_argument("--batch", type=_positive, default=1)
    parser.add_argument("--heads", type=_positive, default=16)
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    directions = ("forward", "backward")
    parser.add_argument("--direction", nargs="+", choices=directions, default=directions)
    parser.add_argument("--full", action="store_true", help="without a causal mask")
    parser.add_argument("--jobs", type=_positive, default=os.cpu_count())
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        parser.error(NEEDS_A_GPU)
    device = torch.device("cuda", torch.cuda.current_device())
    shapes = itertools.product(options.head_dim, options.sequence, options.direction)
    for head_dim, length, direction in shapes:
        heads, dtype = options.heads, DTYPES[options.dtype]
        problem = Problem(
            device, dtype, options.batch, heads, heads, length, length, head_dim,
            is_causal=not options.full, tf32=False,
        )  # fmt: skip
        print(tune(Trial(problem, direction), options.jobs), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
