"""The modes of `timeline` with one sequence, at contexts that a batch of several does not reach."""

from lmlab.chapters.memory.measure.timeline import measure

__all__ = ["measure"]
