"""dK and dV on Hopper, warp-specialized: keys and values resident, queries streamed.

Four of the seven products of the two-pass backward (`bwd_dq` has the others). The loop is in
`bwd_common`.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from lmlab.kernels.hopper.bwd_common import begin_key_tile, dkdv_consumer, producer
from lmlab.kernels.hopper.warpgroup import WG_ROWS


@gluon.jit(do_not_specialize=["batch_heads", "heads", "l2_heads"])
def flash_bwd_dkdv_kernel(
    q, k, v, do, lse, delta, dk, dv, scale, batch_heads, heads, l2_heads, queries, keys,
    SHAPE: gl.constexpr,
):  # fmt: skip
    """One program per key tile of BLOCK_N = 64 * CONSUMERS rows; streams BLOCK_M queries."""
    _, coords, bounds, tiles, barriers = begin_key_tile(
        (q, k, v, do), (lse, delta), batch_heads, heads, l2_heads, queries, keys,
        SHAPE.CONSUMERS * WG_ROWS, SHAPE,
    )  # fmt: skip
    first, _, last, _ = bounds
    # Constexprs survive only in tuples written in the call itself.
    gl.warp_specialize([
        (dkdv_consumer, (tiles, barriers, barriers, (dk, dv), coords, bounds, scale, 0, SHAPE)),
        (dkdv_consumer, (tiles, barriers, barriers, (dk, dv), coords, bounds, scale, 1, SHAPE)),
        (producer, ((k, v), (q, do), (lse, delta), tiles, barriers, coords, first, last, first,
                    True, False, SHAPE)),
    ], [4, 1], [240, 24])  # fmt: skip
