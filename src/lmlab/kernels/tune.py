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
from lmlab.kernels.configs import Case, Direction, Products, Tiles, line_of, shared_bytes
from lmlab.kernels.problem import Problem, processor

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
NEEDS_A_GPU = "a CUDA GPU is needed; on a CPU kernels are interpreted, not timed"
FINALISTS = 4
QUICK_MS, LONG_MS = 20, 200
SHORT = 2048
"""Queries and keys up to which a launch less may be worth reading O more often."""
PATIENCE_S = 120.0
"""A candidate that has not answered by then hangs."""
_PLAIN: tuple[Products, ...] = ("ieee",)
TOLERANCE = {16: 5e-2, 32: 1e-4}
"""Largest error of outputs and gradients of order one, by bits of the type."""


def candidates(case: Case, shared_limit: int) -> Iterator[Tiles]:
    """Every cut worth a try that fits by count."""
    is_short = case.sequence <= SHORT
    if case.bits == 16:
        heights = [32, 64, 128] if is_short else [64, 128]
        choices = itertools.product(
            heights, (32, 64, 128), (4, 8), (2, 3, 4, 5), (False, True), _PLAIN
        )
    else:
        heights = [16, 32, 64, 128] if is_short else [32, 64, 128]
        choices = itertools.product(
            heights, (16, 32, 64), (4, 8), (1, 2, 3), (False, True), _products(case)
        )
    for kept, walked, warps, stages, descriptors, products in choices:
        tiles = Tiles(
            kept=kept,
            walked=walked,
            warps=warps,
            stages=stages,
            descriptors=descriptors,
            products=products,
        )
        if not _is_sensible(case, tiles):
            continue
        yield from (t for t in _with_delta(case, tiles) if shared_bytes(case, t) <= shared_limit)
    if case.architecture == "hopper" and case.bits == 16:
        yield from (t for t in _specialised(case) if shared_bytes(case, t) <= shared_limit)


def _with_delta(case: Case, tiles: Tiles) -> Iterator[Tiles]:
    """The cut, and where a launch may show, without the one for D."""
    yield tiles
    if case.direction == "backward" and case.sequence <= SHORT and tiles.parts == 1:
        yield replace(tiles, own_delta=True)


def _products(case: Case) -> tuple[Products, ...]:
    """Ways to multiply fp32; only backward has its numbers cut into parts."""
    return ("ieee", "tf32x3") if case.direction == "forward" else ("ieee", "tf32x3", "bf16x6")


def _specialised(case: Case) -> Iterator[Tiles]:
    """Cuts for the kernels whose warps are specialised, as far as their registers suffice."""
    forward, wide = case.direction == "forward", case.head_dim > 128
    if wide and not forward:
        return
    heights = [128, 192] if forward and case.head_dim <= 64 else [128]
    walks = [64] if wide else [64, 128] if forward else [32, 64]
    for kept, walked, stages in itertools.product(heights, walks, (2, 3, 4)):
        tiles = Tiles(kept=kept, walked=walked, warps=8, stages=stages, specialised=True)
        yield tiles
        if not forward and case.head_dim in (64, 128) and walked == 64:
            yield replace(tiles, once=True)


def _is_sensible(case: Case, tiles: Tiles) -> bool:
    # A short sequence wants many programs: tiles that are smaller, and walk more than they keep.
    widest, least = (2, 8) if case.sequence <= SHORT else (1, 16)
    if tiles.walked > widest * tiles.kept:
        return False
    if case.bits == 16 and tiles.kept < least * tiles.warps:
        return False
    if case.bits == 32 and tiles.descriptors and tiles.parts == 1:
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
    if trial.problem.device.type != "cuda":
        raise ValueError(NEEDS_A_GPU)
    try:
        time = do_bench(lambda: trial.run(inputs, tiles), rep=budget_ms, return_mode="median")
    except launch.TilesTooLarge:
        return float("inf")
    return float(time)


def is_right(trial: Trial, tiles: Tiles) -> bool:
    """Whether these tiles give the numbers of PyTorch in fp64, on a small problem of the kind."""
    small = Trial(
        # Without a mask, whole tiles: else the kernel in one walk would not be the one that runs.
        replace(trial.problem, batch=1, heads=2, kv_heads=2, queries=384, keys=384),
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
    usable = compile_and_check(trial, tried, jobs)
    print(f"{case}: {len(usable)} of {len(tried)} usable", file=sys.stderr, flush=True)
    if not usable:
        return f"# {case}: none of {len(tried)} cuts fits and is right"
    winner, ms = fastest(trial, usable)
    rate = trial.flops() / ms / 1e9
    return f"{line_of(case, winner)}\n# ^ {ms:.3f} ms, {rate:.0f} TFLOP/s"


def compile_and_check(trial: Trial, tried: Sequence[Tiles], jobs: int) -> list[Tiles]:
    """The tiles that fit and are right; what was compiled stays in Triton's cache on disk.

    Each is run in another process, so that one that hangs is given up and not waited for.
    """
    with get_context("spawn").Pool(jobs) as pool:
        answers = [pool.apply_async(is_usable, (trial, tiles)) for tiles in tried]
        return [tiles for tiles, answer in zip(tried, answers, strict=True) if _is_yes(answer)]


def _is_yes(answer: AsyncResult[bool]) -> bool:
    try:
        return answer.get(PATIENCE_S)
    except TimeoutError:
        return False


def is_usable(trial: Trial, tiles: Tiles) -> bool:
    """Run the problem itself and the check once."""
    try:
        trial.run(trial.inputs(), tiles)
    except launch.TilesTooLarge:
        return False
    return is_right(trial, tiles)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed; an integer of at least 1 is")
    return int(text)


def main(arguments: Sequence[str] | None = None) -> int:
    """Tune the problems asked for and print their lines."""
    parser = argparse.ArgumentParser(prog="lmlab.kernels.tune", description=__doc__.split("\n")[0])
    parser.add_argument("--head-dim", type=_positive, nargs="+", default=[64, 128])
    parser.add_argument("--sequence", type=_positive, nargs="+", default=[16384])
    parser.add_argument("--batch", type=_positive, default=1)
    parser.add_argument("--heads", type=_positive, default=16)
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--direction", nargs="+", choices=("forward", "backward"), default=None)
    parser.add_argument("--full", action="store_true", help="without a causal mask")
    parser.add_argument("--jobs", type=_positive, default=os.cpu_count())
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        parser.error(NEEDS_A_GPU)
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
