"""How the work is cut, one line a case; the first line that covers a case is taken.

What of it was timed, all on an H200 under a causal mask: for bf16 at head dimensions 64 and 128
sixteen heads of 16384; for bf16 and fp32 at head dimensions up to 128 one head of 4096 to 65536,
where the fp32 backward has since come to add its products apart. With the host kept out: in bf16
one head of 128 to 2048 backward at head dimensions 64 and 128, of 256 to 2048 forward at 128, and
48 and 100 heads of 512 backward at 64; in fp32 one head of 128 to 512 at 128 and of 128 at 64
backward, of 1024 and 2048 backward at every head dimension up to 128, and of 128, 1024 and 2048
forward at 128. Other lines for one short head follow those of their neighbours: when they were
timed the host was slower than the GPU and hid which cut is fastest. Other lines up to 1024 queries
in many heads were chosen and not timed: kernels that the host launches quickly instead of those
that are a little faster on the GPU. Those of Hopper at head dimension 256 and of the other
architectures have not been timed either.

A backward that makes D by itself saves a launch, which of one head of up to 2048 queries is a tenth
to half of the time: at head dimension 64 in bf16 12.4 instead of 17.3 us for 512 queries with the
same tiles, 23.7 instead of 28.5 for 2048. In fp32 at head dimension 64 and in both types below, 512
queries and fewer were timed with the tiles that are chosen and no others: 9.5 instead of 14.7 us in
bf16 at 32, 16.4 instead of 22.1 in fp32 at 64.

One walk or two, by the number of rows: at head dimension 64 one head of 32768 takes 0.87 ms in two
walks and 0.94 in one, two of 16384 0.44 and 0.49, four of 8192 0.24 and 0.25. At 128 one head of
32768 takes 1.31 and 1.50, two of 16384 0.68 and 0.78; but three of them 1.34 and 1.07, one of them
0.62 and 0.58, one of 65536 4.94 and 4.74, four of 8192 0.54 and 0.39, sixteen of 2048 0.19 and
0.14. Without a mask two walks stay at 128: one was not timed there.

Columns: architecture (several with commas), direction, bits of the type, head dimension (up to),
mask (causal, full, any), longer sequence (up to), batch x heads x queries (up to); then the choice:
rows kept, rows walked, warps, stages, and words for what is not the plain way (`descriptors`,
`persistent`, `apart` for a backward whose keys and queries are programs of their own, `specialised`
for the kernels of Hopper whose warps load or compute, `once` for its backward in one walk,
`own-delta` for a backward that makes D by itself, `tf32x3` and `bf16x6` for how fp32 is
multiplied). `python -m lmlab.kernels.tune` measures on the GPU at hand and prints such lines.

This is Python and not a data file so that a changed cut changes the fingerprint of what was
measured with it.

Until a line is measured it is chosen so that no register spills and two programs share a processor
where they can: the compiler tells both without a GPU. In fp32 plain products (`ieee`) run outside
the tensor cores, which only small tiles and head dimensions stand; otherwise three TF32 products or
six of bf16 parts are taken instead, whose sum differs from the plain one in the last two of its 24
bits.
"""

TABLE = """
# architecture    direction bits dim  mask sequence   rows   kept walked warps stages
hopper            forward   16    32  any     any      any    64  128  4  3
hopper            forward   16    64  any    1024      any    64   64  4  3
hopper            forward   16    64  any     any     8192    64   64  4  3
hopper            forward   16    64  any     any      any   192  128  8  3  specialised
hopper            forward   16   128  any     any     1024    32   64  4  3
hopper            forward   16   128  any     any     8192    64  128  4  3
hopper            forward   16   128  any    1024      any    64   64  4  3
hopper            forward   16   128  any     any    16384   128   64  8  3  descriptors
hopper            forward   16   128  any     any      any   128  128  8  3  specialised
hopper            forward   16   256  any     any      any   128   32  8  3  descriptors
hopper            backward  16    32  any    1024      any    64   64  4  3  own-delta
hopper            backward  16    32  any     any     2048    64   64  4  3  own-delta
hopper            backward  16    32  any     any    16384    64   64  4  3
hopper            backward  16    32  any     any      any    64   64  4  3  descriptors
hopper            backward  16    64  any     any      512    32   64  4  3  own-delta
hopper            backward  16    64  any    1024      any    64   32  4  3  own-delta
hopper            backward  16    64  any     any     2048    64   64  4  3  own-delta
hopper            backward  16    64  any     any     4096    64   64  4  3
hopper            backward  16    64  any     any     8192    32  128  4  2
hopper            backward  16    64  any     any    16384    64   64  4  3  descriptors
hopper            backward  16    64  any     any    32768   128   64  8  3  specialised
hopper            backward  16    64  any     any      any   128   64  8  3  specialised once
hopper            backward  16   128  any     any      256    32   32  4  3  own-delta
hopper            backward  16   128  any     any     1024    32   64  4  3  own-delta
hopper            backward  16   128  any     any     2048    64   64  4  3  own-delta
hopper            backward  16   128  any     any     8192    64   64  4  3
hopper            backward  16   128  any    1024      any    64   32  4  3
hopper            backward  16   128  causal 8192      any   128   64  8  2  specialised once
hopper            backward  16   128  causal  any    16384   128   64  8  2  specialised once
hopper            backward  16   128  any     any    32768   128   64  8  3  specialised
hopper            backward  16   128  causal  any      any   128   64  8  2  specialised once
hopper            backward  16   128  any     any      any   128   64  8  3  specialised
hopper            backward  16   256  any     any      any    64   32  8  2  descriptors
hopper            forward   32    32  any     any     2048    64   32  4  2  tf32x3
hopper            forward   32    32  any     any    16384   128   64  8  2  tf32x3
hopper            forward   32    32  any     any      any   128   32  8  2  tf32x3
hopper            forward   32    64  any     any     2048    32   32  4  2  tf32x3
hopper            forward   32   128  any     any      128    16   32  4  2  tf32x3
hopper            forward   32   128  any     any     1024    32   32  4  3  tf32x3
hopper            forward   32   128  any     any     2048    32   64  8  2  tf32x3
hopper            backward  32    64  any     any      256    16   32  4  2  own-delta tf32x3
hopper            backward  32    64  any     any      512    32   32  4  2  own-delta tf32x3
hopper            backward  32    16  any     any    16384    64   64  4  2  descriptors bf16x6
hopper            backward  32    16  any     any      any    64   32  4  2  descriptors bf16x6
hopper            backward  32    32  any     any      any    64   64  4  2  descriptors bf16x6
hopper            backward  32    64  any     any     1024    32   64  8  2  tf32x3
hopper            backward  32    64  any     any     8192    64   64  4  2  descriptors bf16x6
hopper            backward  32    64  any     any      any    64   32  4  2  descriptors bf16x6
hopper            backward  32   128  any     any      512    16   32  4  2  own-delta tf32x3
hopper            backward  32   128  any     any     1024    32   64  8  2  tf32x3
hopper            backward  32   128  any     any      any    64   32  4  2  descriptors bf16x6
ampere            forward   16    64  any     any      any   128   64  4  3
ampere            forward   16   128  any     any      any   128   64  8  3
ampere,ada        forward   16   256  any     any      any    64   32  8  2
ampere            backward  16    64  any     any      any    64   32  4  3
ampere            backward  16   128  any     any      any    64   32  4  3
ampere,ada        backward  16   256  any     any      any    64   32  8  2
ada               forward   16    64  any     any      any   128   64  8  2
ada               forward   16   128  any     any      any   128   32  8  2
ada               backward  16    64  any     any      any    64   32  4  2
ada               backward  16   128  any     any      any    64   32  4  2
blackwell         forward   16   128  any     any      any   128   64  8  3  descriptors
blackwell         forward   16   256  any     any      any   128   32  8  2  descriptors
blackwell         backward  16   128  any     any      any    64   64  4  3
blackwell         backward  16   256  any     any      any    64   32  8  2
ampere,ada,hopper,blackwell forward   32   32  any  any  any    64   32  4  2
ampere,ada,hopper,blackwell forward   32   64  any  any  any   128   32  8  2  tf32x3
ampere,ada,hopper,blackwell forward   32  128  any  any  any   128   32  8  2  tf32x3
ampere,ada,hopper,blackwell forward   32  256  any  any  any    32   16  8  2
ampere,ada,hopper,blackwell backward  32   32  any  any  any    32   32  4  2
ampere,ada,hopper,blackwell backward  32   64  any  any  any    32   32  4  2  tf32x3
ampere,ada,hopper,blackwell backward  32  128  any  any  any    32   16  8  2  tf32x3
ampere,ada,hopper,blackwell backward  32  256  any  any  any    32   16  8  1
cpu               forward   32   256  any     any      any    64   32  4  1
cpu               forward   16   256  any     any      any    64   32  4  1
cpu               backward  32   256  any     any      any    64   32  4  1
cpu               backward  16   256  any     any      any    64   32  4  1
"""
