"""Data parallelism: every scheme on the same ranks."""

from functools import partial

from lmlab.study.grids import rank_points

points = partial(rank_points, "data_parallel", own=("bucket_sizes_mb", "torch_bucket_mb"))
