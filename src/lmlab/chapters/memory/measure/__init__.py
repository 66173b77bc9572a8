"""Where the memory goes: one size, context and precision; or one model and ways to checkpoint it.

Three modes are recorded one after the other in one process, the allocator emptied and its counters
reset between them: `forward` without a gradient, `forward_graph` (the graph that backward needs is
kept, and nothing follows: what published peaks of a forward pass mean), and `train_step`. Each is
run once unrecorded first, so that libraries have their workspaces and the optimizer its state.
A mode that runs out of memory says so and tells what was live; the other modes keep their numbers.

`data`: `modes` by name, each with `status`, `reason`, the replayed peak and its parts (see
`measure.memory.summary`), `accounting` of the device's memory, `predicted` by the cost model (null
for a model or an attention that it does not describe); `before`, the accounting with nothing of the
model there; `stream_bytes`, the size of one fp32 tensor of the residual stream.
"""

from __future__ import annotations

import torch

from lmlab.chapters.memory.measure import checkpointing as memory_checkpointing
from lmlab.chapters.memory.measure import timeline as memory_modes
from lmlab.jobs.outcome import Outcome, Unsupported
from lmlab.measure.precision import why_unsupported
from lmlab.study.points import Point

TOPICS = {
    "timeline": memory_modes.measure_modes,
    "checkpointing": memory_checkpointing.measure_strategies,
}


def measure(point: Point, device: torch.device) -> Outcome:
    """Measure what the point's topic asks for."""
    if reason := why_unsupported(str(point.parameters["precision"]), device):
        raise Unsupported(reason)
    return TOPICS[str(point.parameters["topic"])](point, device)
