"""Sharded optimizer: memory and time with and without sharded state."""

from functools import partial

from lmlab.study.grids import rank_points

points = partial(rank_points, "sharded_optimizer", own=("bucket_mb",))
