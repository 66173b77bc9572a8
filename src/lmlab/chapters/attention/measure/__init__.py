"""Attention: six experiments, a module each, from the naive formula to our own kernels.

- `naive`: what the plain formula costs in time and memory, eager and compiled.
- `model_compile`: what compiling the whole model gives.
- `benchmark`: every variant on one shape, forward, backward and both.
- `tiles`: our kernels cut in different ways.
- `leaderboard`: the one shape that others publish.
- `model`: a train step with one attention and with another.

A point names its topic, and only that topic's module is imported: the path is made of a string, so
that the code a point depends on is its own topic and the variants that it names, and a change in
one topic sends no other back to the machine (`lmlab.jobs.registry` adds both to the code
that a fingerprint covers).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lmlab import import_path

if TYPE_CHECKING:
    import torch

    from lmlab.jobs.outcome import Outcome
    from lmlab.study.points import Point

TOPICS = ("naive", "model_compile", "benchmark", "tiles", "leaderboard", "model")


def measure(point: Point, device: torch.device) -> Outcome:
    """Run the experiment that the point's topic names."""
    topic = point.parameters["topic"]
    if topic not in TOPICS:
        raise ValueError(f"topic = {topic!r}; allowed: {', '.join(TOPICS)}")
    outcome: Outcome = import_path.resolve(f"{__name__}.{topic}:measure")(point, device)
    return outcome
