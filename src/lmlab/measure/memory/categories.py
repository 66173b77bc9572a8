"""What every piece of memory is for.

By identity, where somebody can name it: at every mark the caller says which addresses hold weights,
gradients and optimizer state, and a piece that is live there is that. By the observer for copies of
weights that autocast makes. Everything else by the phase that it was born in:

    parameters       the weights
    gradients        what is some weight's .grad once backward is done
    optimizer_state  what the optimizer keeps between steps
    weight_copies    16-bit copies of weights that autocast makes and keeps for the pass
    activations      born in forward and live when it ends: kept for backward. Without a graph
                     nothing is kept, and what one operator hands to the next are the activations
    workspace        everything else that a step makes: what forward gives back at once, gradients
                     of activations, the optimizer's temporaries; and what a library keeps between
                     steps (cuBLAS has a workspace that nobody's tensor owns)
    other            inputs, tables of the model, the marks of the recording
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from lmlab.measure.memory.observer import Made
from lmlab.measure.memory.recorder import Known, Recording, Span
from lmlab.measure.memory.replay import BEFORE, Piece, Replay
from lmlab.measure.memory.sources import Source, source_of

Category = Literal[
    "parameters",
    "gradients",
    "optimizer_state",
    "weight_copies",
    "activations",
    "workspace",
    "other",
]
CATEGORIES: tuple[Category, ...] = (
    "parameters",
    "optimizer_state",
    "gradients",
    "weight_copies",
    "activations",
    "workspace",
    "other",
)
"""From what always is there to what comes and goes: the order in which they are stacked."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Labelled:
    """A piece, what it is for, and what is known of it."""

    piece: Piece
    category: Category
    phase: str
    what: str
    source: Source | None


def label(recording: Recording, replayed: Replay, *, keeps_graph: bool) -> list[Labelled]:
    """Every piece with its category, in the order of birth."""
    known = _known(recording, replayed)
    made = _made(recording.observer.made, replayed.pieces)
    labelled = []
    for number, piece in enumerate(replayed.pieces):
        phase = _phase_of(piece, recording.phases)
        note = made.get(number)
        category = _category(
            piece, phase, known.get(number), note, keeps_graph=keeps_graph, recording=recording
        )
        labelled.append(
            Labelled(
                piece=piece,
                category=category,
                phase="before" if phase is None else phase.name,
                what=_what(piece, known.get(number), note),
                source=source_of(piece.frames) or (note.source if note is not None else None),
            )
        )
    return labelled


def _category(
    piece: Piece,
    phase: Span | None,
    known: Known | None,
    made: Made | None,
    *,
    keeps_graph: bool,
    recording: Recording,
) -> Category:
    if known is not None:
        return known.category  # type: ignore[return-value]
    if piece.born in recording.marks:
        return "other"
    if phase is None or phase.name != "forward":
        return "workspace"
    if made is not None and made.copy_of is not None:
        return "weight_copies"
    kept = piece.is_live_at(phase.end) if keeps_graph else made is not None
    return "activations" if kept else "workspace"


def _known(recording: Recording, replayed: Replay) -> dict[int, Known]:
    """Pieces that are live where somebody named their address, by their number."""
    found: dict[int, Known] = {}
    for position, names in recording.known:
        for number, piece in enumerate(replayed.pieces):
            if piece.address in names and piece.is_live_at(position):
                found[number] = names[piece.address]
    return found


def _made(notes: Iterable[Made], pieces: Sequence[Piece]) -> dict[int, Made]:
    """Pieces with the operator that made them: at each address both come in the same order."""
    waiting: dict[int, list[int]] = defaultdict(list)
    for number, piece in enumerate(pieces):
        if piece.born != BEFORE:
            waiting[piece.address].append(number)
    found: dict[int, Made] = {}
    for note in notes:
        here = waiting.get(note.address, [])
        match = next((n for n in here if pieces[n].size == note.size), None)
        if match is not None:
            found[match] = note
            waiting[note.address] = [n for n in here if n > match]
    return found


def _phase_of(piece: Piece, phases: Sequence[Span]) -> Span | None:
    for phase in phases:
        if phase.start < piece.born <= phase.end:
            return phase
    return None


def _what(piece: Piece, known: Known | None, made: Made | None) -> str:
    if known is not None:
        return known.name
    return made.label() if made is not None else piece.operation
