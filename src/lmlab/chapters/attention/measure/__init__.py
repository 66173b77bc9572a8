"""Attention in eight topics, one module each, from the plain formula to our own kernels.

- `naive`: what the plain formula costs in time and memory, eager and compiled.
- `softmax`: the operations of the plain formula one by one, softmax fused and written out.
- `model_compile`: what compiling the whole model gives.
- `benchmark`: every variant at one shape; forward, backward and both, with memory and host time.
- `shapes`: the same with the heads, head dimension and contexts of the study's models.
- `tiles`: our kernels with different tile sizes.
- `leaderboard`: the one shape that others publish.
- `model`: a training step with one attention and with another.

Only the topic that a point names is imported, by a path built from a string: so a result depends on
the code of its own topic and of the variants it names, and editing one topic makes no other stale
(`lmlab.jobs.registry` adds both to the fingerprint).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lmlab import import_path

if TYPE_CHECKING:
    import torch

    from lmlab.jobs.outcome import Outcome
    from lmlab.study.points import Point


def measure(point: Point, device: torch.device) -> Outcome:
    """Measure a point of any topic."""
    topic = import_path.resolve(f"{__name__}.{point.parameters['topic']}:measure")
    outcome: Outcome = topic(point, device)
    return outcome
