"""Chapters in topics, one module each, whose `measure` measures a point of that topic.

Only the topic that a point names is imported, by a path built from a string: so a result depends on
the code of its own topic and of the variants it names, and editing one topic makes no other stale
(`lmlab.jobs.registry` adds both to the fingerprint).
"""

import torch

from lmlab import import_path
from lmlab.jobs.outcome import Outcome
from lmlab.study.points import Point


def measure_topic(package: str, point: Point, device: torch.device) -> Outcome:
    """Measure a point of any topic of the package."""
    topic = import_path.resolve(f"{package}.{point.parameters['topic']}:measure")
    outcome: Outcome = topic(point, device)
    return outcome
