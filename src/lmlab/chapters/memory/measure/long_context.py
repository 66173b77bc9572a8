"""The modes of `timeline` at batch 1, for contexts that larger batches cannot reach."""

from lmlab.chapters.memory.measure.timeline import measure

__all__ = ["measure"]
