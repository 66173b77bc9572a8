"""The whole model through torch.compile against the eager model: one graph, forward and backward.

The compiled model has the same parameters, so both variants share everything. The first compiled
step includes compilation, with cold caches, and is recorded separately. Forward runs as in
training, saving what backward needs (inference would be another graph and another compilation).
The optimizer is not compiled.

Records: see `model`; `attention_replaced` (how often the compiler substituted fused attention).
"""

import torch

from lmlab.chapters.attention.measure.compiling import attention_replaced, compiler
from lmlab.chapters.attention.measure.model import SharedModel, compare
from lmlab.chapters.attention.measure.variants import Variants
from lmlab.jobs.outcome import Outcome
from lmlab.jobs.workload import workload_of
from lmlab.measure.precision import tf32_allowed
from lmlab.measure.records import value
from lmlab.study.points import Point

EAGER, COMPILED = "eager", "compiled"


def measure(point: Point, device: torch.device) -> Outcome:
    """Compare the eager and the compiled model."""
    workload = workload_of(point)
    variants = Variants((EAGER, COMPILED), device)
    with tf32_allowed(workload.precision.tf32), compiler(cold=True, in_parallel=True):
        model = workload.build(device)
        compiled = torch.compile(model, fullgraph=True, dynamic=False)
        shared = SharedModel(workload, model, {EAGER: model, COMPILED: compiled}, device)
        needs = {COMPILED: "compiled"}
        outcome = compare(shared, variants, point.settings, needs=needs, compiles=True)
        if COMPILED not in variants.running:
            return outcome
        replaced = value("attention_replaced", attention_replaced(), "", variant=COMPILED)
    return Outcome(measurements=[*outcome.measurements, replaced])
