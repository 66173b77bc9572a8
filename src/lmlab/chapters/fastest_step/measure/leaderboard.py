"""The course's 2026 leaderboard: a step of an 8B-shaped model on a long sequence, on one GPU.

The whole model and its optimizer state may not fit on one GPU, so as many layers are used as fit.
The rungs are first measured with a few layers, all with fused attention and checkpointed
activations, without which this sequence does not fit at all. Then the peaks of two shallow models
predict how deep a third may be, since memory grows linearly with depth; if that does not fit, one
layer fewer is tried until one does. Every attempt is recorded.

Records: those of `ladder` for the rungs, without device times; per number of layers (label
`layers`) `time` and `peak_memory`, or why it did not fit; `layer_time`, the time that each further
layer adds; `layers` and `throughput` of the deepest.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from lmlab.chapters.attention.measure.compiling import call_ms, compiler
from lmlab.chapters.attention.measure.variants import Variants, free_memory
from lmlab.chapters.fastest_step.measure.ladder import Ladder
from lmlab.chapters.fastest_step.measure.rungs import CHANGES, Rung, refuse_without_bf16, shape_of
from lmlab.chapters.fastest_step.measure.trainer import RungStep, Trainer
from lmlab.jobs.outcome import Outcome
from lmlab.measure.device import peak_memory_bytes, reset_peak_memory
from lmlab.measure.records import Record, value
from lmlab.model.shape import ModelShape
from lmlab.study.points import Point

MARGIN = 0.97
"""Share of the device's memory that a prediction may fill."""


def measure(point: Point, device: torch.device) -> Outcome:
    """Climb with few layers, then find how many fit."""
    refuse_without_bf16(device, "a step of this size needs a GPU")
    asked = {**point.settings, **point.parameters}
    shape = shape_of(asked, context=asked["sequence"], num_layers=asked["shallow"])
    start = Rung(
        name="attention", precision="bf16", attention=asked["attentions"][0],
        checkpoint=asked["checkpoint"],
    )  # fmt: skip
    with compiler(cold=True, in_parallel=True):
        ladder = Ladder(Trainer(shape, asked, device), asked, start)
        ladder.take(start)
        for name in asked["rungs"]:
            ladder.climb(name)
        rung, records = ladder.rung, ladder.records
        del ladder
        free_memory(device)
        best = replace(rung, name="deepest", **CHANGES["masters"])
        return Outcome(measurements=[*records, *deepest(shape, best, asked, device)])


def deepest(
    shape: ModelShape, rung: Rung, asked: Mapping[str, Any], device: torch.device
) -> list[Record]:
    """Time and peak of two shallow models and of the deepest that fits."""
    records: list[Record] = []

    def attempt(depth: int) -> tuple[float, int] | None:
        found, tried = step_at(depth, shape, rung, asked, device)
        records.extend(tried)
        return found

    shallow = asked["shallow"]
    first, second = attempt(shallow), attempt(2 * shallow)
    if first is None or second is None:
        return records
    per_layer = (second[1] - first[1]) / shallow
    room = MARGIN * torch.cuda.get_device_properties(device).total_memory - second[1]
    depth = min(asked["most_layers"], 2 * shallow + int(room / per_layer))
    found = None
    while depth > 2 * shallow and (found := attempt(depth)) is None:
        depth -= 1
    time_ms, _ = found or second
    return [
        *records,
        value("layers", depth, ""),
        value("layer_time", (time_ms - first[0]) / (depth - shallow), "ms"),
        value("throughput", 1e3 * shape.tokens / time_ms, "1/s"),
    ]


def step_at(
    depth: int, shape: ModelShape, rung: Rung, asked: Mapping[str, Any], device: torch.device
) -> tuple[tuple[float, int] | None, list[Record]]:
    """Step time and peak memory at a depth, None if it failed, and the records of the attempt."""
    variants = Variants({"deepest": {"layers": depth}}, device)
    found = None
    with variants.attempt("deepest"):
        deep = replace(shape, num_layers=depth)
        step = RungStep(Trainer(deep, asked, device, narrow=True), rung)
        step.run()
        reset_peak_memory(device)
        time_ms = min(call_ms(step.run, device) for _ in range(2))
        found = time_ms, int(peak_memory_bytes(device) or 0)
        variants.note("deepest", "time", time_ms, "ms")
        variants.note("deepest", "peak_memory", found[1], "B")
        del step
    free_memory(device)
    return found, variants.records
