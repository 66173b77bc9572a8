"""Every variant at a shape of the study's models: batch, heads, head dimension and context.

The race of `benchmark` has one head and long sequences, where a kernel fills the GPU by its length.
In a model the work is many heads of short sequences, which other kernels and tiles may suit better,
and where the time to launch a kernel can exceed its own.

Records: as `benchmark`.
"""

from lmlab.chapters.attention.measure.benchmark import measure

__all__ = ["measure"]
