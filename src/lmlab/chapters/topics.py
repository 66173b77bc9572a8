"""Chapters split into topics: one module per topic, each with its own `measure`.

The module is imported by a name built at run time, which the static import analysis does not see.
So a result depends only on its own topic and the variants it names (`lmlab.jobs.registry` adds both
to the fingerprint), and editing one topic does not make the results of another stale.
"""

import torch

from lmlab import import_path
from lmlab.jobs.outcome import Outcome
from lmlab.study.points import Point


def measure_topic(package: str, point: Point, device: torch.device) -> Outcome:
    """Measure a point with the module of its topic."""
    topic = import_path.resolve(f"{package}.{point.parameters['topic']}:measure")
    outcome: Outcome = topic(point, device)
    return outcome
