"""Tiling: a matmul in larger tiles loads each number less often.

A tile of t x t results loads 2 t numbers for every t^2 multiplications: t / 2 FLOPs per byte in
bf16. Small tiles are bound by loads, large ones by the tensor cores, until a tile needs so many
registers or so much shared memory that too few blocks fit on an SM. Each tile is measured with
programs in row-major order and in groups of rows that share data in the L2; cuBLAS is measured too.

How many blocks fit on an SM comes from the driver (`blocks_per_sm`); `limit` names the resource
that runs out first, from what the compiled kernel takes (`registers`, `shared_memory`, `warps`).
"""

import ctypes
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from lmlab.chapters.principles.measure.programs import INTERPRETED, Program, asked_of, compare
from lmlab.jobs.outcome import Outcome, Unsupported
from lmlab.kernels.principles_matmul import matmul
from lmlab.measure.records import Record, value, values
from lmlab.study.points import Point

GROUP = 8
WITHIN = 1e-2
WARPS = {16: 1, 32: 2, 64: 4, 128: 8, 256: 8}


def measure(point: Point, device: torch.device) -> Outcome:
    """Every tile in both orders."""
    if device.type != "cuda":
        raise Unsupported(INTERPRETED)
    asked = asked_of(point)
    side, tiles = asked["side"], [(rows, columns) for rows, columns in asked["tiles"]]
    a, b = (torch.randn(side, side, device=device, dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    program = partial(
        Program,
        expected=a[:256].double() @ b.double(),
        within=WITHIN,
        numbers={"flops": 2 * side**3},
    )
    largest = max(m * n / (m + n) for m, n in tiles)
    library = program(call=partial(torch.mm, a, b, out=out), series="library", x=largest)
    programs = {"cuBLAS": library}
    card = torch.cuda.get_device_properties(device)
    resources = [value("warps_per_sm", card.max_threads_per_multi_processor // 32, "")]
    for (rows, columns), group in product(tiles, (0, GROUP)):
        options = options_for(rows, columns)
        run = partial(matmul, a, b, group=group, out=out, **options)
        ends = {tiles[0]: "without", tiles[-1]: "with"} if group else {}
        programs[f"{rows} x {columns}{', grouped' if group else ''}"] = program(
            call=partial(result_of, run),
            series="with" if group else "without",
            x=rows * columns / (rows + columns),
            pair=ends.get((rows, columns), ""),
        )
        if group:
            _, kernel = run()
            resources += resources_of(kernel, f"{rows} x {columns}", options["warps"], device)
    return compare(programs, asked, device).outcome(*resources)


def result_of(run: Callable[[], tuple[Tensor, Any]]) -> Tensor:
    """The product, without the kernel that computed it."""
    return run()[0]


def options_for(rows: int, columns: int) -> dict[str, int]:
    """Launch parameters of a tile."""
    depth = 64 if min(rows, columns) >= 64 else 32
    warps = WARPS[min(rows, columns)]
    return {
        "block_m": rows, "block_n": columns, "block_k": depth, "warps": warps,
        "stages": 3 if rows * columns >= 2**14 else 4,
    }  # fmt: skip


def resources_of(kernel: Any, tile: str, warps: int, device: torch.device) -> list[Record]:
    """What a compiled kernel takes, how many of its blocks fit on an SM, and why not more."""
    card: Any = torch.cuda.get_device_properties(device)
    shared, registers = kernel.metadata.shared, kernel.n_regs
    limits = {
        "registers": card.regs_per_multiprocessor // max(1, registers * 32 * warps),
        "shared memory": card.shared_memory_per_multiprocessor // max(1, shared + 1024),
        "warps": card.max_threads_per_multi_processor // (32 * warps),
    }
    blocks = blocks_per_sm(kernel, 32 * warps, shared)
    limit = min(limits, key=lambda name: limits[name])
    numbers = {"registers": registers, "shared_memory_bytes": shared, "warps": warps}
    if blocks is not None:
        numbers["blocks_per_sm"] = blocks
        limit = "blocks" if blocks < limits[limit] else limit
    return [*values(numbers, tile=tile), value("limit", limit, "", tile=tile)]


def blocks_per_sm(kernel: Any, threads: int, shared: int) -> int | None:
    """Occupancy as the CUDA driver computes it; None if the driver gives no answer."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    blocks = ctypes.c_int()
    failed = cuda.cuOccupancyMaxActiveBlocksPerMultiprocessor(
        ctypes.byref(blocks),
        ctypes.c_void_p(kernel.function),
        ctypes.c_int(threads),
        ctypes.c_size_t(shared),
    )
    return None if failed else blocks.value
