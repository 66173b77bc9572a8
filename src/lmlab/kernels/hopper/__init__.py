"""Warp-specialized attention kernels for Hopper, written in Gluon, 16-bit types only.

`fwd` is the forward. The backward is `bwd_fused`, all gradients in one pass (head dimension up to
64, many heads), or `bwd_dkdv` (`bwd_dkdv_wide` beyond head dimension 128) followed by `bwd_dq`.
`launch` chooses among them and plans their launches.
"""
