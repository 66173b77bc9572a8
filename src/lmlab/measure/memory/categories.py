"""What every allocation is for.

By identity if possible: at every mark the caller lists the addresses of weights, gradients and
optimizer state, and an allocation that is live there is that. By the observer for the copies of
weights that autocast makes. Everything else by the phase in which it was made:

    parameters       the weights
    gradients        what is some weight's .grad after backward
    optimizer_state  what the optimizer keeps between steps
    weight_copies    16-bit copies of weights that autocast makes and keeps for the pass
    activations      made in forward and live when it ends: saved for backward. Without a graph
                     nothing is saved, and what operators pass to the next are the activations
    workspace        everything else that a step makes: temporaries of forward, gradients of
                     activations, the optimizer's temporaries; and what a library keeps between
                     steps (cuBLAS has a workspace that no tensor owns)
    other            inputs, buffers of the model, the marks of the recording
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lmlab.measure.memory.observer import NewStorage
from lmlab.measure.memory.recorder import KnownTensor, Recording, Span
from lmlab.measure.memory.replay import BEFORE, Allocation, Replay
from lmlab.measure.memory.sources import Source, source_of

CATEGORIES = (
    *("parameters", "optimizer_state", "gradients", "weight_copies"),
    *("activations", "workspace", "other"),
)
"""From permanent to temporary: the order in which figures stack them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Labelled:
    """An allocation, what it is for, and what is known about it."""

    allocation: Allocation
    category: str
    phase: str
    what: str
    source: Source | None


def label(recording: Recording, replayed: Replay, *, keeps_graph: bool) -> list[Labelled]:
    """Every allocation with its category, in order of birth."""
    known = _known(recording, replayed)
    storages = _storages(recording.observer.storages, replayed.allocations)
    labelled = []
    for number, allocation in enumerate(replayed.allocations):
        tensor, storage = known.get(number), storages.get(number)
        phase = _phase_of(allocation, recording.phases)
        if tensor is not None:
            category, what = tensor.category, tensor.name
        else:
            is_mark = allocation.born in recording.marks
            inferred = _inferred(allocation, phase, storage, keeps_graph=keeps_graph)
            category = "other" if is_mark else inferred
            what = allocation.operation if storage is None else storage.label()
        labelled.append(
            Labelled(
                allocation=allocation,
                category=category,
                phase="before" if phase is None else phase.name,
                what=what,
                source=source_of(allocation.frames) or (storage.source if storage else None),
            )
        )
    return labelled


def _inferred(
    allocation: Allocation, phase: Span | None, storage: NewStorage | None, *, keeps_graph: bool
) -> str:
    """Category of an allocation at no known address."""
    if phase is None or phase.name != "forward":
        return "workspace"
    if storage is not None and storage.copy_of is not None:
        return "weight_copies"
    saved = allocation.is_live_at(phase.end) if keeps_graph else storage is not None
    return "activations" if saved else "workspace"


def _known(recording: Recording, replayed: Replay) -> dict[int, KnownTensor]:
    """Number of an allocation to the known tensor at its address while it was live."""
    return {
        number: tensors[allocation.address]
        for position, tensors in recording.known
        for number, allocation in enumerate(replayed.allocations)
        if allocation.address in tensors and allocation.is_live_at(position)
    }


def _storages(
    storages: Iterable[NewStorage], allocations: Sequence[Allocation]
) -> dict[int, NewStorage]:
    """Number of an allocation to its storage: at each address both come in the same order."""
    waiting: dict[int, list[int]] = defaultdict(list)
    for number, allocation in enumerate(allocations):
        if allocation.born != BEFORE:
            waiting[allocation.address].append(number)
    found: dict[int, NewStorage] = {}
    for storage in storages:
        numbers = waiting.get(storage.address, [])
        match = next((n for n in numbers if allocations[n].size == storage.size), None)
        if match is not None:
            found[match] = storage
            waiting[storage.address] = [n for n in numbers if n > match]
    return found


def _phase_of(allocation: Allocation, phases: Sequence[Span]) -> Span | None:
    return next((phase for phase in phases if phase.start < allocation.born <= phase.end), None)
