"""Warp-specialized attention kernels for Hopper, written in Gluon, 16-bit types only.

`fwd` is the forward. The backward is `bwd_fused` (head dimension up to 64) and `bwd_fused_d128` (up
to 128), which compute all gradients in one pass, or `bwd_dkdv` followed by `bwd_dq`, which need no
order between programs and suit few heads. `launch` decides and launches.
"""
