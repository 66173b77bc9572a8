"""FSDP next to data parallelism and PyTorch's own `fully_shard`."""

from functools import partial

from lmlab.study.grids import rank_points

points = partial(rank_points, "fsdp", own=("bucket_mb",))
