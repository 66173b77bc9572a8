"""Tile sizes and launch options by problem shape; the first row that covers a problem applies.

Columns: architectures, direction, bits of the type, head dimension (up to), mask (causal, full,
any); the longer of queries and keys (up to), which is the length of a program's loop; 64-row blocks
of queries per SM (up to), which is how full the GPU is; then BLOCK_M (query rows), BLOCK_N (key
rows), warps, stages and options: `tma`, `unpaired` (backward with separate programs for keys and
queries), `warp-specialized` (Hopper kernels), `two-per-sm` (two programs of their forward per SM),
`fused` (their one-pass backward), `rotated` (its programs start at different query blocks, where
they can), `inline-delta` (backward without a launch for delta), `whole` (only for lengths that are
multiples of 64), `tf32x3` and `bf16x6` (how fp32 is multiplied).
`python -m lmlab.kernels.tune` measures on the current GPU and prints such rows. `docs/kernels.md`
says which rows were timed and which follow their neighbors.

Rows that were not timed are chosen so that no registers spill and, where possible, two programs
share an SM; the compiler reports both without a GPU. Plain fp32 products (`ieee`) do not use tensor
cores, so only small tiles and head dimensions use them.

The table is code, not data, so that a changed row changes the fingerprint of what was measured.
"""

TABLE = """
# architecture direction bits dim mask sequence blocks BLOCK_M BLOCK_N warps stages
hopper    forward   16  32 any       64  any   64   64  4  3
hopper    forward   16  32 any      256    8   64   64  4  3
hopper    forward   16  32 any     1024    4   64  128  4  3
hopper    forward   16  32 any     1024  any  128   64  8  3  two-per-sm warp-specialized
hopper    forward   16  32 any      any    8   64  128  4  3
hopper    forward   16  32 any      any  any   64   64  4  3  tma
hopper    forward   16  64 any       64  any   64   64  4  2
hopper    forward   16  64 causal   128    8   64   64  4  2
hopper    forward   16  64 full     128    4   64   64  4  2
hopper    forward   16  64 full     128  any  128   64  8  3  warp-specialized
hopper    forward   16  64 any      256    2   64   64  4  3
hopper    forward   16  64 causal   256    4   64   64  4  2
hopper    forward   16  64 causal   256    8   64   64  4  2  tma
hopper    forward   16  64 full     256    4   64   64  4  2
hopper    forward   16  64 full     256   16  128  128  8  3  warp-specialized
hopper    forward   16  64 any      256  any  128   64  8  3  two-per-sm warp-specialized
hopper    forward   16  64 any     1024    2   64  128  4  3  tma
hopper    forward   16  64 full    1024    3   64   64  4  3  tma
hopper    forward   16  64 full    1024    4  128   64  4  3
hopper    forward   16  64 causal  1024    4   64   64  4  3  tma
hopper    forward   16  64 full    1024  any  128  128  8  3  warp-specialized
hopper    forward   16  64 causal  1024  any  128   64  8  3  two-per-sm warp-specialized
hopper    forward   16  64 full     any    1   64  128  4  3
hopper    forward   16  64 causal  2048  1/4   64   64  4  3  tma
hopper    forward   16  64 causal  2048    3   64  128  4  3  tma
hopper    forward   16  64 any     2048    4  128  128  8  3  warp-specialized
hopper    forward   16  64 causal  2048    5   64   64  4  3  tma
hopper    forward   16  64 causal  2048    8  128   64  8  3  two-per-sm warp-specialized
hopper    forward   16  64 causal  4096  1/2   64   64  4  3  tma
hopper    forward   16  64 any      any    8  128  128  8  3  warp-specialized
hopper    forward   16  64 any      any  any  192  128  8  3  warp-specialized
hopper    forward   16 128 any       64  any   64   64  4  3  tma
hopper    forward   16 128 any      128    1   64  128  4  2  tma
hopper    forward   16 128 any      128    2   64   64  4  2  tma
hopper    forward   16 128 causal   128    4   64   64  4  2
hopper    forward   16 128 full     128    4   64   64  4  3  tma
hopper    forward   16 128 any      256    2   64   64  4  3  tma
hopper    forward   16 128 full     192  any  128   64  8  3  warp-specialized
hopper    forward   16 128 causal   512    2   64   64  4  3  tma
hopper    forward   16  96 causal   256  any  128   64  8  3  warp-specialized
hopper    forward   16 128 causal   256  any  128   64  8  2  warp-specialized whole
hopper    forward   16 128 causal   512  any  128   64  8  3  warp-specialized
hopper    forward   16 128 causal  1024    2   64   64  4  3  tma
hopper    forward   16 128 causal  1024    8  128   64  8  3  warp-specialized
hopper    forward   16 128 causal  2048    1   64   64  4  3  tma
hopper    forward   16 128 causal  4096  1/2   64   64  4  3  tma
hopper    forward   16 128 full     any    1   64   64  4  3  tma
hopper    forward   16 128 causal   any    2  128   64  8  3  warp-specialized
hopper    forward   16 128 any      any  any  128  128  8  2  warp-specialized
hopper    forward   16 256 any       64  any   64   64  4  1  tma
hopper    forward   16 256 any      128    1   64   64  4  2  tma
hopper    forward   16 256 any      512    1   64   64  4  3  tma
hopper    forward   16 256 any      any    1   64   32  4  2
hopper    forward   16 256 any      any  any  128   64  8  2  warp-specialized
hopper    backward  16  32 any      256  any   32   64  4  3  inline-delta
hopper    backward  16  32 any     1024    2   64   64  4  3  inline-delta
hopper    backward  16  32 any      any  any   64   64  4  3  tma whole
hopper    backward  16  32 any      any   16  128   64  4  2  tma
hopper    backward  16  32 any      any  any   64  128  8  2  warp-specialized
hopper    backward  16  64 any      128  1/2   64   64  4  3  inline-delta
hopper    backward  16  64 causal   128  any   32   64  4  3  inline-delta
hopper    backward  16  64 full     128    4   32   64  4  3  inline-delta
hopper    backward  16  64 any      256  1/2   32   64  4  3  inline-delta
hopper    backward  16  64 any      256    1   64   64  4  3  inline-delta
hopper    backward  16  64 full     256  any   32   64  4  3  tma whole
hopper    backward  16  64 any      256    4   64   64  4  3  tma unpaired whole
hopper    backward  16  64 any      256  any   64   64  4  3  tma whole
hopper    backward  16  64 any      512  1/4   32   64  4  3  inline-delta
hopper    backward  16  64 any      512    1   64   64  4  3  inline-delta
hopper    backward  16  64 full     512    2   64   64  4  3  inline-delta
hopper    backward  16  64 full     512  any   32   64  4  3  tma whole
hopper    backward  16  64 any      512    8   64   64  4  3  tma unpaired whole
hopper    backward  16  64 any      512  any   64   64  4  3  tma whole
hopper    backward  16  64 any     1024  1/8   32   64  4  3  inline-delta
hopper    backward  16  64 any     1024  1/2   64   64  4  3  inline-delta
hopper    backward  16  64 causal  1024    4   64  128  8  2  warp-specialized
hopper    backward  16  64 full    1024    1   64   64  4  3  tma unpaired whole
hopper    backward  16  64 any     2048  1/4   64   64  4  3  inline-delta
hopper    backward  16  64 full    2048    1   64   64  4  3  tma unpaired whole
hopper    backward  16  64 full    8192    1   64   64  4  3  tma whole
hopper    backward  16  64 full    8192  1/2   64   64  4  3  tma
hopper    backward  16  64 full     512  any   64  128  8  2  warp-specialized fused
hopper    backward  16  64 full    1024    1   64  128  8  2  warp-specialized fused
hopper    backward  16  64 full    8192    1   64  128  8  2  warp-specialized
hopper    backward  16  64 full     any   16   64  128  8  2  warp-specialized fused rotated
hopper    backward  16  64 full    1024    4   64   64  4  3  tma unpaired whole
hopper    backward  16  64 full    1024    6   64   64  4  3  tma whole
hopper    backward  16  64 any     1024    8   64  128  8  2  warp-specialized fused
hopper    backward  16  64 causal  1024  any   64   64  4  3  tma whole
hopper    backward  16  64 full    2048    3   64   64  4  3  tma unpaired whole
hopper    backward  16  64 full    2048    4   64   64  4  3  tma whole
hopper    backward  16  64 full    2048    8   64   64  4  3  tma unpaired whole
hopper    backward  16  64 full    8192    2   64   64  4  3  tma whole
hopper    backward  16  64 full    8192    3   64  128  8  2  warp-specialized
hopper    backward  16  64 full     any    4   64   64  4  3  tma whole
hopper    backward  16  64 causal  8192  1/2   64  128  8  2
hopper    backward  16  64 causal  8192    1   64  128  8  2  whole
hopper    backward  16  64 any      any    4   64  128  8  2  warp-specialized
hopper    backward  16  64 causal  2048    8   64   64  4  3  tma unpaired whole
hopper    backward  16  64 any      any  any   64  128  8  2  warp-specialized fused
hopper    backward  16 128 any      128    4   32   64  4  3  inline-delta
hopper    backward  16 128 any       64  any   32   64  4  3  tma
hopper    backward  16 128 any      512  1/2   32   64  4  3  inline-delta
hopper    backward  16 128 full     any  1/2   64   64  4  3  tma
hopper    backward  16 128 causal  1024  1/2   64   64  4  3
hopper    backward  16 128 causal  2048  1/4   64   64  4  3
hopper    backward  16 128 any     1024  any   64  128  8  2  warp-specialized
hopper    backward  16 128 causal 16384    1   64  128  8  3
hopper    backward  16 128 any      any  any   64  128  8  2  warp-specialized
hopper    backward  16 256 any      any  1/8   32   32  4  2
hopper    backward  16 192 any      any  any   64  128  8  2  warp-specialized
hopper    backward  16 256 any      any  any   32  128  8  2  warp-specialized
hopper    forward   32  32 any      any  1/4   64   32  4  2  tf32x3
hopper    forward   32  32 any      any    2  128   64  8  2  tf32x3
hopper    forward   32  32 any      any  any  128   32  8  2  tf32x3
hopper    forward   32  64 any      any  1/4   32   32  4  2  tf32x3
hopper    forward   32 128 any      any 1/64   16   32  4  2  tf32x3
hopper    forward   32 128 any      any  1/8   32   32  4  3  tf32x3
hopper    forward   32 128 any      any  1/4   32   64  8  2  tf32x3
hopper    backward  32  64 any      any 1/32   32   16  4  2  inline-delta tf32x3
hopper    backward  32  64 any      any 1/16   32   32  4  2  inline-delta tf32x3
hopper    backward  32  16 any      any    2   64   64  4  2  tma bf16x6
hopper    backward  32  16 any      any  any   32   64  4  2  tma bf16x6
hopper    backward  32  32 any      any  any   64   64  4  2  tma bf16x6
hopper    backward  32  64 any      any  1/8   64   32  8  2  tf32x3
hopper    backward  32  64 any      any    1   64   64  4  2  tma bf16x6
hopper    backward  32  64 any      any  any   32   64  4  2  tma bf16x6
hopper    backward  32 128 any      any 1/16   32   16  4  2  inline-delta tf32x3
hopper    backward  32 128 any      any  1/8   64   32  8  2  tf32x3
hopper    backward  32 128 any      any  any   32   64  4  2  tma bf16x6
ampere    forward   16  64 any      any  any  128   64  4  3
ampere    forward   16 128 any      any  any  128   64  8  3
ampere    backward  16  64 any      any  any   32   64  4  3
ampere    backward  16 128 any      any  any   32   64  4  3
ada       forward   16  64 any      any  any  128   64  8  2
ada       forward   16 128 any      any  any  128   32  8  2
ampere,ada forward   16 256 any      any  any   64   32  8  2
ada       backward  16  64 any      any  any   32   64  4  2
ada       backward  16 128 any      any  any   32   64  4  2
ampere,ada backward  16 256 any      any  any   32   64  8  2
blackwell forward   16 128 any      any  any  128   64  8  3  tma
blackwell forward   16 256 any      any  any  128   32  8  2  tma
blackwell backward  16 128 any      any  any   64   64  4  3
blackwell backward  16 256 any      any  any   32   64  8  2
ampere,ada,hopper,blackwell forward   32  32 any      any  any   64   32  4  2
ampere,ada,hopper,blackwell forward   32  64 any      any  any  128   32  8  2  tf32x3
ampere,ada,hopper,blackwell forward   32 128 any      any  any  128   32  8  2  tf32x3
ampere,ada,hopper,blackwell forward   32 256 any      any  any   32   16  8  2
ampere,ada,hopper,blackwell backward  32  32 any      any  any   32   32  4  2
ampere,ada,hopper,blackwell backward  32  64 any      any  any   32   32  4  2  tf32x3
ampere,ada,hopper,blackwell backward  32 128 any      any  any   16   32  8  2  tf32x3
ampere,ada,hopper,blackwell backward  32 256 any      any  any   16   32  8  1
cpu       forward   32 256 any      any  any   64   32  4  1
cpu       forward   16 256 any      any  any   64   32  4  1
cpu       backward  32 256 any      any  any   32   64  4  1
cpu       backward  16 256 any      any  any   32   64  4  1
"""
