"""The fastest training step in three topics, one module each.

- `ladder`: a model of the study, from the plain fp32 step to the best one.
- `kernels`: our fused AdamW and our LM head with loss, next to the library's.
- `leaderboard`: a step of an 8B shape at a long sequence, with as many layers as fit.

Only the topic that a point names is imported, so editing one makes no other stale.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lmlab import import_path

if TYPE_CHECKING:
    import torch

    from lmlab.jobs.outcome import Outcome
    from lmlab.study.points import Point

TOPICS = ("ladder", "kernels", "leaderboard")


def measure(point: Point, device: torch.device) -> Outcome:
    """Measure a point of any topic."""
    topic = point.parameters["topic"]
    if topic not in TOPICS:
        raise ValueError(f"topic = {topic!r}; allowed: {', '.join(TOPICS)}")
    outcome: Outcome = import_path.resolve(f"{__name__}.{topic}:measure")(point, device)
    return outcome
