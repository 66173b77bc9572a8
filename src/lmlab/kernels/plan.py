"""How a problem is launched with given tiles: programs, order, splits and constants.

**L2 scheduling.** Programs start in an order that keeps the K and V in use within half of the L2
(`l2_heads` heads at a time); the other half is left to the tiles being written.

**Splits.** A single head of a few thousand queries has fewer tiles than a large GPU has SMs. The
loop of each tile (over keys; in the backward also over queries) is then divided among programs
until the GPU is filled about twice, as long as each keeps a few iterations, because merging the
partial results takes time too.
"""

from dataclasses import dataclass
from typing import Any

from lmlab.kernels.configs import Tiles
from lmlab.kernels.problem import Problem, ceil_div, power_of_two

FULL, TOGETHER = 8, 16
"""With more than FULL blocks per SM, the backward schedules at most TOGETHER key heads together.
Long and short loops then run at the same time, and reads are spread more evenly."""
MAX_SPLITS = 16
MIN_TILES_PER_SPLIT = 4
"""Iterations per split in the forward; half as many in the backward, whose iterations do more."""


@dataclass(frozen=True)
class Plan:
    """A launch without its tensors."""

    programs: int
    l2_heads: int
    splits: int
    constants: dict[str, Any]
    """Compile-time arguments of the kernel and launch options."""


def forward_plan(problem: Problem, tiles: Tiles) -> Plan:
    """How to launch the forward kernel."""
    items = ceil_div(problem.queries, tiles.block_m) * problem.batch_heads
    most = ceil_div(problem.keys, tiles.block_n) // MIN_TILES_PER_SPLIT
    # The warp-specialized kernel cannot split. Where it is much faster than the portable one, or
    # without a mask, a program per SM keeps it busy.
    is_better = problem.head_dim > 128 or not problem.is_causal
    per_sm = 1 if tiles.warp_specialized and is_better else 2
    splits = tiles.splits or _splits(items, most, per_sm * problem.gpu.num_sms)
    return Plan(
        programs=items * splits,
        l2_heads=_l2_heads(problem, 2) * problem.group_size,
        splits=splits,
        constants=_constants(problem, tiles) | {"SPLITS": splits},
    )


def backward_plan(problem: Problem, tiles: Tiles) -> Plan:
    """How to launch the portable backward kernel, whose resident tiles have BLOCK_N rows."""
    num_sms = problem.gpu.num_sms
    key_tiles = ceil_div(problem.keys, tiles.block_n)
    query_tiles = ceil_div(problem.queries, tiles.block_n)
    items = max(key_tiles, query_tiles) * problem.batch_kv_heads
    # Paired tiles give all programs equally long loops; separate ones give twice as many programs,
    # which a small problem needs more. Grouped-query heads would unbalance the halves of a pair.
    paired = tiles.paired and problem.group_size == 1 and items >= num_sms
    splits = 1
    if not paired:
        items = key_tiles * problem.batch_kv_heads + query_tiles * problem.batch_heads
        iterations = ceil_div(problem.sequence, tiles.block_m)
        most = 2 * iterations // MIN_TILES_PER_SPLIT
        splits = tiles.splits or _splits(items, most, 2 * num_sms)
    terms = 1 if problem.tf32 else tiles.terms
    constants = _constants(problem, tiles) | {
        "PAIRED": paired,
        "TERMS": terms,
        "SPLITS": splits,
        "INLINE_DELTA": tiles.inline_delta and terms == 1,
    }
    heads = _l2_heads(problem, 4)
    if problem.blocks_per_sm > FULL:
        heads = min(heads, TOGETHER)
    return Plan(items * splits, heads, splits, constants)


def rows_per_program(problem: Problem) -> int:
    """Rows per program of a one-pass kernel: 16 KiB of 16-bit numbers."""
    return 8192 // power_of_two(problem.head_dim)


def row_constants(problem: Problem) -> dict[str, int]:
    """Compile-time arguments of the one-pass kernels, for delta and for decomposing fp32."""
    return {
        "ROWS": rows_per_program(problem),
        "BLOCK_D": power_of_two(problem.head_dim),
        "HEAD_DIM": problem.head_dim,
    }


def delta_programs(problem: Problem) -> int:
    """Programs of the delta kernel."""
    return ceil_div(problem.queries, rows_per_program(problem)) * problem.batch_heads


def decompose_grid(problem: Problem) -> tuple[int, int]:
    """Grid of the kernel that decomposes fp32; the second dimension selects q, do, k or v."""
    key_programs = ceil_div(problem.keys, rows_per_program(problem)) * problem.batch_kv_heads
    return max(delta_programs(problem), key_programs), 4


def _constants(problem: Problem, tiles: Tiles) -> dict[str, Any]:
    longer_side = max(tiles.block_m, tiles.block_n)
    precision = "ieee" if tiles.terms > 1 else tiles.fp32_dot  # products of terms are plain bf16
    return {
        "BLOCK_M": tiles.block_m,
        "BLOCK_N": tiles.block_n,
        "BLOCK_D": power_of_two(problem.head_dim),
        "HEAD_DIM": problem.head_dim,
        "DESCRIPTOR": False,
        "IS_CAUSAL": problem.is_causal,
        "RAGGED_QUERIES": problem.queries % longer_side != 0,
        "RAGGED_KEYS": problem.keys % longer_side != 0,
        "PRECISION": "tf32" if problem.tf32 else precision,
        "num_warps": tiles.warps,
        "num_stages": tiles.stages,
    }


def _splits(items: int, at_most: int, programs: int) -> int:
    """Programs per work item: a power of two, to compile few variants."""
    wanted = min(programs // items, at_most, MAX_SPLITS)
    return 1 << (max(1, wanted).bit_length() - 1)


def _l2_heads(problem: Problem, tensors: int) -> int:
    """Number of key and value heads whose tensors together fit in half of the L2."""
    one_head = tensors * problem.sequence * problem.head_dim * problem.dtype.itemsize
    return min(max(1, problem.gpu.l2_bytes // 2 // one_head), problem.batch_kv_heads)
