"""Control divergence: threads of a warp that take different branches wait for each other.

A warp has one instruction stream: with n distinct branches inside every warp it takes n times as
long. If all threads of a warp take the same branch, any number of branches costs nothing. Triton
has no per-thread branches, so the kernel is CUDA, compiled at run time by NVRTC through PyTorch.
Both programs do the same work on the same numbers: branch i mod n is taken by thread i in one, by
warp i in the other, and each branch is a loop of its own with its own constant.
"""

from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from lmlab.chapters.principles.measure.programs import Program, asked_of, compare
from lmlab.jobs.outcome import Outcome, Unsupported
from lmlab.study.points import Point

WARP = 32
BLOCK = 256
ITERATIONS = 256
SHIFT = 0.01


def source() -> str:
    """The kernel, with a loop per branch."""
    cases = "\n".join(
        f"case {branch}:\n#pragma unroll 1\nfor (int k = 0; k < {ITERATIONS}; ++k)"
        f" v = v * {factor(branch)!r}f + {SHIFT!r}f;\nbreak;"
        for branch in range(WARP)
    )
    return f"""
extern "C" __global__ void diverge(const float* x, float* y, int branches, int per_warp) {{
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  float v = x[i];
  switch ((per_warp ? i / {WARP} : i) % branches) {{
{cases}
  }}
  y[i] = v;
}}
"""


def factor(branch: Any) -> Any:
    """The constant of a branch."""
    return 1 - (branch + 1) / 2048


def expected(x: Tensor, branches: int, per_warp: bool) -> Tensor:
    """The same in PyTorch, in float64."""
    threads = torch.arange(len(x), device=x.device)
    factors = factor(((threads // WARP if per_warp else threads) % branches).double())
    total = x.double()
    for _ in range(ITERATIONS):
        total = total * factors + SHIFT
    return total


def measure(point: Point, device: torch.device) -> Outcome:
    """Each number of branches, split within every warp and between warps."""
    compile_kernel = getattr(torch.cuda, "_compile_kernel", None)
    if device.type != "cuda":
        raise Unsupported("a CPU has no warps")
    if compile_kernel is None:
        raise Unsupported("this version of PyTorch cannot compile CUDA at run time")
    asked = asked_of(point)
    kernel = compile_kernel(source(), "diverge")
    x = torch.randn(asked["threads"], device=device)
    y = torch.empty_like(x)

    def run(branches: int, per_warp: bool) -> Tensor:
        grid = (len(x) // BLOCK, 1, 1)
        kernel(grid=grid, block=(BLOCK, 1, 1), args=[x, y, branches, int(per_warp)])
        return y

    programs = {}
    for branches, per_warp in product(asked["branches"], (False, True)):
        kind, where = ("with", "between") if per_warp else ("without", "within")
        programs[f"{branches} branches {where} warps"] = Program(
            call=partial(run, branches, per_warp),
            expected=expected(x, branches, per_warp),
            within=1e-4,
            series=kind,
            x=branches,
            pair=kind if branches == max(asked["branches"]) else "",
            numbers={"flops": 2 * ITERATIONS * len(x), "bytes": 8 * len(x)},
        )
    return compare(programs, asked, device).outcome()
