"""Six principles of fast GPU code, one module each.

A principle is a pair of small programs that differ in that one thing. Only the topic that a point
names is imported, so editing one makes no other stale.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lmlab import import_path

if TYPE_CHECKING:
    import torch

    from lmlab.jobs.outcome import Outcome
    from lmlab.study.points import Point

TOPICS = ("divergence", "precision", "fusion", "recomputation", "coalescing", "tiling")


def measure(point: Point, device: torch.device) -> Outcome:
    """Measure a point of any topic."""
    topic = point.parameters["topic"]
    if topic not in TOPICS:
        raise ValueError(f"topic = {topic!r}; allowed: {', '.join(TOPICS)}")
    outcome: Outcome = import_path.resolve(f"{__name__}.{topic}:measure")(point, device)
    return outcome
