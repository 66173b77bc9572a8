"""Find the fastest tiles for this GPU: `python -m lmlab.kernels.tune`.

The grid covers short to long sequences, each also with a ragged length, and problems that fill a
fraction of the GPU or fill it many times over (blocks of queries per SM). Every candidate that fits
is compiled (in parallel, because compiling takes longer than timing), checked against PyTorch's
attention on a small problem, and timed at each grid point; the fastest few are timed again,
interleaved. Inputs have a model's memory layout, (batch, sequence, heads, head_dim), and the clock
is the study's: device time with a cold L2.

The winners are printed as rows to insert above those in `tile_sizes`, which still apply beyond the
longest sequence and the fullest GPU of the grid. Neighboring grid points with the same winners
share a row; where whole and ragged lengths differ, the row for whole lengths is marked `whole`. The
default is bf16 with a causal mask; --dtype and --full print rows for other cases. Without a mask
`configs` may exchange 128 and 192 query rows of a warp-specialized forward, by the number of waves.
"""

import argparse
import itertools
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from multiprocessing import TimeoutError, get_context

import torch
import torch.nn.functional as F
from torch import Tensor

from lmlab.kernels import launch
from lmlab.kernels.configs import (
    WHOLE,
    Fp32Dot,
    Tiles,
    can_rotate,
    format_row,
    orient,
    shared_bytes,
)
from lmlab.kernels.problem import BLOCK_ROWS, Problem
from lmlab.measure.kernel_clock import measure_in_rounds
from lmlab.measure.stop_rule import SamplingBudget

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
HEAD_DIMS = [32, 64, 128, 256]
LENGTHS = [2**n for n in range(6, 18)]
SEQUENCES = [128, 256, 512, 1024, 2048, 4096, 16384]
RAGGED = 24
"""Rows that a ragged length lacks: fewer than a block, so that it belongs to the same row."""
BLOCKS_PER_SM = [0.25, 1.0, 4.0, 16.0, 64.0]
MODEL_HEADS = 16
"""More heads than these are further sequences of the batch, as in a model."""
QUICK = SamplingBudget(min_samples=5, max_samples=5, time_cap_s=60)
"""The cap includes the first call, which compiles."""
FINAL = SamplingBudget(min_samples=30, max_samples=60, time_cap_s=2)
FINALISTS = 4
SHORT = 2048
"""Queries and keys up to which saving a launch may be worth reading O again."""
TIMEOUT_S = 120.0
"""A candidate that has not finished by then hangs."""
TOLERANCE = {16: 5e-2, 32: 1e-4}
"""Largest error of outputs and gradients of order one, by bits of the type."""


def candidates(problem: Problem) -> Iterator[Tiles]:
    """All tiles worth trying whose estimated shared memory fits."""
    tried = _portable(problem)
    if problem.gpu.architecture == "hopper" and problem.bits == 16:
        tried = itertools.chain(tried, _warp_specialized(problem))
    return (tiles for tiles in tried if shared_bytes(problem, tiles) <= problem.gpu.shared_limit)


def _portable(problem: Problem) -> Iterator[Tiles]:
    is_short = problem.sequence <= SHORT
    resident = [32, 64, 128] if problem.bits == 16 else [16, 32, 64, 128]
    streamed = [32, 64, 128] if problem.bits == 16 else [16, 32, 64]
    fewest = 1 if problem.bits == 32 or problem.sequence <= BLOCK_ROWS else 2
    stages = [fewest, fewest + 1, fewest + 2]
    dots: tuple[Fp32Dot, ...] = ("ieee",) if problem.bits == 16 else ("ieee", "tf32x3")
    if problem.bits == 32 and problem.direction == "backward":
        dots = (*dots, "bf16x6")
    choices = itertools.product(
        resident if is_short else resident[1:], streamed, (4, 8), stages, (False, True), dots
    )
    for resident_rows, streamed_rows, warps, depth, tma, dot in choices:
        m, n = orient(problem.direction, resident_rows, streamed_rows)
        tiles = Tiles(block_m=m, block_n=n, warps=warps, stages=depth, tma=tma, fp32_dot=dot)
        if not _is_sensible(problem, tiles):
            continue
        yield tiles
        if problem.direction == "backward" and tma:
            yield replace(tiles, paired=False)
        if problem.direction == "backward" and is_short and tiles.terms == 1:
            yield replace(tiles, inline_delta=True)


def _is_sensible(problem: Problem, tiles: Tiles) -> bool:
    resident, streamed = tiles.rows(problem.direction)
    # Short sequences need many programs: smaller tiles, which may stream more rows than they keep.
    widest, least = (2, 8) if problem.sequence <= SHORT else (1, 16)
    if streamed > widest * resident or (problem.bits == 16 and resident < least * tiles.warps):
        return False
    has_tma = problem.gpu.architecture in ("hopper", "blackwell")
    return not tiles.tma or (has_tma and (problem.bits == 16 or tiles.terms > 1))


def _warp_specialized(problem: Problem) -> Iterator[Tiles]:
    """Tiles for the Hopper kernels for which registers suffice."""
    is_forward, is_wide = problem.direction == "forward", problem.head_dim > 128
    resident = [128, 192] if is_forward and problem.head_dim <= 64 else [128]
    streamed = ([64] if is_wide else [64, 128]) if is_forward else [32, 64] if is_wide else [64]
    for resident_rows, streamed_rows, stages in itertools.product(resident, streamed, (2, 3, 4, 6)):
        m, n = orient(problem.direction, resident_rows, streamed_rows)
        tiles = Tiles(block_m=m, block_n=n, warps=8, stages=stages, warp_specialized=True)
        yield tiles
        if is_forward and problem.head_dim <= 64 and (m, n) == (128, 64):
            yield replace(tiles, programs_per_sm=2)
        elif not is_forward and 32 < problem.head_dim <= 64:
            yield replace(tiles, fused=True)
            if can_rotate(problem):
                yield replace(tiles, fused=True, rotated=True)


def inputs_of(p: Problem) -> tuple[Tensor, ...]:
    """Random q, k, v in a model's memory layout; for the backward, grad_o, q, k, v, o, lse."""
    generator = torch.Generator(p.device).manual_seed(0)
    shape = (p.batch, p.queries, p.heads, p.head_dim)
    q, k, v, grad_o = (
        torch.randn(shape, device=p.device, dtype=p.dtype, generator=generator).transpose(1, 2)
        for _ in range(4)
    )
    if p.direction == "forward":
        return q, k, v
    o, lse = launch.forward(q, k, v, is_causal=p.is_causal, scale=p.head_dim**-0.5)
    return grad_o, q, k, v, o, lse


def run(problem: Problem, inputs: tuple[Tensor, ...], tiles: Tiles | None) -> tuple[Tensor, ...]:
    """Run the forward or backward, with tiles from the table if none are given."""
    function = launch.forward if problem.direction == "forward" else launch.backward
    scale = problem.head_dim**-0.5
    return function(*inputs, is_causal=problem.is_causal, scale=scale, tiles=tiles)


def fastest(problem: Problem, tried: Sequence[Tiles]) -> Tiles | None:
    """The fastest tiles that run: each candidate is timed alone, then the best few interleaved."""
    call = partial(run, problem, inputs_of(problem))
    finalists = fastest_first(call, tried, problem.device, QUICK)[:FINALISTS]
    return next(iter(fastest_first(call, finalists, problem.device, FINAL)), None)


def fastest_first(
    call: Callable[[Tiles], object],
    tried: Sequence[Tiles],
    device: torch.device,
    budget: SamplingBudget,
) -> list[Tiles]:
    """The tiles that fit, by their median time in interleaved rounds."""
    variants = {str(place): partial(partial, call, tiles) for place, tiles in enumerate(tried)}
    measured, errors = measure_in_rounds(variants, device=device, budget=budget)
    for error in errors.values():
        if not isinstance(error, launch.TilesTooLarge):
            raise error
    return [tried[int(x)] for x in sorted(measured, key=lambda x: measured[x].median_ms)]


def is_usable(problem: Problem, tiles: Tiles) -> bool:
    """Whether the tiles fit and match PyTorch's fp64 results on a small problem of this kind."""
    length = 384 if problem.is_whole else 384 - RAGGED
    small = of_length(replace(problem, batch=1, heads=2, kv_heads=2), length)
    inputs = inputs_of(small)
    try:
        found = run(small, inputs, tiles)
    except launch.TilesTooLarge:
        return False
    first = 0 if small.direction == "forward" else 1
    q, k, v = wide = [x.double().requires_grad_() for x in inputs[first : first + 3]]
    o = F.scaled_dot_product_attention(q, k, v, is_causal=small.is_causal)
    expected = (o,) if small.direction == "forward" else torch.autograd.grad(o, wide, inputs[0])
    atol = TOLERANCE[small.bits]
    pairs = zip(found, expected, strict=False)
    return all(torch.allclose(x.double(), y, rtol=0, atol=atol) for x, y in pairs)


def usable(problem: Problem, tried: Sequence[Tiles], jobs: int) -> list[Tiles]:
    """The tiles that fit and are correct; compiled kernels stay in Triton's cache on disk.

    Worker processes run them, so that a hanging kernel can be abandoned.
    """
    found = []
    with get_context("spawn").Pool(jobs) as pool:
        for tiles, answer in [(x, pool.apply_async(is_usable, (problem, x))) for x in tried]:
            with suppress(TimeoutError):
                found += [tiles] if answer.get(TIMEOUT_S) else []
    return found


def of_length(problem: Problem, length: int) -> Problem:
    """The same problem with `length` queries and keys."""
    return replace(problem, queries=length, keys=length)


def problems(like: Problem, lengths: Sequence[int]) -> Iterator[Problem]:
    """The grid: for each length, ascending head counts (at least 1) up to BLOCKS_PER_SM."""
    for length in sorted(set(lengths)):
        counts = {max(1, int(n * like.gpu.num_sms * BLOCK_ROWS / length)) for n in BLOCKS_PER_SM}
        for count in sorted(counts):
            heads = min(count, MODEL_HEADS)
            sized = replace(like, batch=count // heads, heads=heads, kv_heads=heads)
            yield of_length(sized, length)


def tune(like: Problem, lengths: Sequence[int], jobs: int) -> list[str]:
    """Rows of the table for one direction, head dimension, type and mask."""
    checked: dict[tuple[Tiles, bool], bool] = {}

    def winner(problem: Problem) -> Tiles | None:
        is_whole, tried = problem.is_whole, list(candidates(problem))
        unknown = [tiles for tiles in tried if (tiles, is_whole) not in checked]
        if unknown:
            good = set(usable(problem, unknown, jobs))
            checked.update({(tiles, is_whole): tiles in good for tiles in unknown})
        tried = [tiles for tiles in tried if checked[tiles, is_whole]]
        print(f"{problem}: {len(tried)} usable", file=sys.stderr, flush=True)
        return fastest(problem, tried)

    winners = []
    for problem in problems(like, lengths):
        ragged_problem = of_length(problem, problem.sequence - RAGGED)
        whole, ragged = winner(problem), winner(ragged_problem)
        if whole and ragged:
            winners.append((problem, whole, ragged))
    return list(merge(winners))


def merge(winners: Sequence[tuple[Problem, Tiles, Tiles]]) -> Iterator[str]:
    """Merge winners into table rows: one where whole and ragged lengths agree, else two. Neighbors
    of one length with the same winners share rows, bounded by the last of them."""
    for (_, whole, ragged), group in itertools.groupby(
        winners, key=lambda winner: (winner[0].sequence, *winner[1:])
    ):
        *_, (problem, _, _) = group
        if whole != ragged:
            yield f"{format_row(problem, whole)} {WHOLE}"
        yield format_row(problem, ragged)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a positive integer, got {text!r}")
    return int(text)


def main(arguments: Sequence[str] | None = None) -> int:
    """Tune the requested cases and print their rows."""
    parser = argparse.ArgumentParser(
        prog="lmlab.kernels.tune",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--head-dim", type=_positive, nargs="+", default=HEAD_DIMS)
    parser.add_argument("--sequence", type=int, nargs="+", choices=LENGTHS, default=SEQUENCES)
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    directions = ("forward", "backward")
    parser.add_argument("--direction", nargs="+", choices=directions, default=directions)
    parser.add_argument("--full", action="store_true", help="without a causal mask")
    parser.add_argument("--jobs", type=_positive, default=os.cpu_count())
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        parser.error("a CUDA GPU is needed; on a CPU kernels are interpreted, not timed")
    device = torch.device("cuda", torch.cuda.current_device())
    for head_dim, direction in itertools.product(sorted(options.head_dim), options.direction):
        like = Problem(
            device, DTYPES[options.dtype], batch=1, heads=1, kv_heads=1, queries=1, keys=1,
            head_dim=head_dim, is_causal=not options.full, tf32=False, direction=direction,
        )  # fmt: skip
        print(*tune(like, options.sequence, options.jobs), sep="\n", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
