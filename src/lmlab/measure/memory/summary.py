"""A recording in the few numbers and lists that a page is made from.

Bytes are blocks, as the allocator counts them; those asked for stand beside the peak. Pieces that
are the same thing over and over (the w1 of every layer) are one row with a count: a list of the
largest allocations would otherwise be one matrix thirty times.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from lmlab.measure.memory.categories import CATEGORIES, Labelled, label
from lmlab.measure.memory.envelope import kept_positions
from lmlab.measure.memory.recorder import Recording, Span
from lmlab.measure.memory.replay import BEFORE, Replay, replay, running_totals

MAX_VERTICES = 240
MAX_ROWS = 12
LAYER_NUMBER = re.compile(r"\.\d+\.")


def summarise(
    recording: Recording,
    *,
    keeps_graph: bool,
    stream_bytes: int,
    score_shape: tuple[int, ...] = (),
) -> dict[str, Any]:
    """Everything that a result keeps of one recorded step."""
    replayed = replay(recording.history)
    labelled = label(recording, replayed, keeps_graph=keeps_graph)
    start, end = recording.phases[0].start, recording.phases[-1].end
    peak = replayed.peak_position(start, end + 1)
    moment = end if recording.out_of_memory is not None else peak
    live = [each for each in labelled if each.piece.is_live_at(moment)]
    totals = replayed.totals(lambda piece: piece.block_bytes)
    return {
        "events": end - start,
        "history_was_cut": recording.history.dropped,
        "replayed_bytes": totals[peak - BEFORE],
        "replayed_requested_bytes": replayed.totals(lambda piece: piece.size)[peak - BEFORE],
        "peak_event": peak - start,
        "peak_phase": _phase_at(peak, recording.phases),
        "live_categories_bytes": _by_category(live),
        "live_scores_bytes": activations_shaped(live, score_shape),
        "live_pieces": len(live),
        "live_lines": by_line(live),
        "live_largest": largest(live),
        "phases": [_phase(span, totals, start) for span in recording.phases],
        "timeline": _timeline(labelled, replayed, start, end),
        "stream": found_tensors(labelled, live, stream_bytes),
    }


def by_line(live: Iterable[Labelled]) -> list[dict[str, Any]]:
    """Live bytes by the line that asked for them, most first; what has no line goes by phase."""
    groups: dict[tuple[Any, ...], list[Labelled]] = defaultdict(list)
    for each in live:
        groups[(each.source, each.category, None if each.source else each.phase)].append(each)
    rows = [
        {**_place(members[0]), "category": category, "phase": members[0].phase, **_sum(members)}
        for (_, category, _), members in groups.items()
    ]
    return _most_first(rows)


def largest(live: Iterable[Labelled]) -> list[dict[str, Any]]:
    """The largest single allocations, equal ones as one row."""
    groups: dict[tuple[Any, ...], list[Labelled]] = defaultdict(list)
    for each in live:
        what = LAYER_NUMBER.sub(".*.", each.what)
        groups[(each.piece.size, each.category, each.phase, what, each.source)].append(each)
    rows = [
        {
            "each_bytes": size,
            "what": what,
            "category": category,
            "phase": phase,
            **_place(members[0]),
            **_sum(members),
        }
        for (size, category, phase, what, _), members in groups.items()
    ]
    return sorted(rows, key=lambda row: (-row["each_bytes"], -row["count"]))[:MAX_ROWS]


def activations_shaped(live: Iterable[Labelled], shape: tuple[int, ...]) -> dict[str, int]:
    """Live bytes of activations of one shape by data type: what attention keeps of its square."""
    totals: Counter[str] = Counter()
    dimensions = "×".join(map(str, shape))
    for each in live:
        # What the observer writes: operator, shape, type.
        if each.category == "activations" and each.what.split(" ")[1:2] == [dimensions]:
            totals[each.what.split(" ")[2]] += each.piece.block_bytes
    return dict(totals)


def found_tensors(
    labelled: Sequence[Labelled], live: Sequence[Labelled], size: int
) -> dict[str, Any]:
    """How often a tensor of exactly this size was allocated, is live at the peak, and by whom."""
    lines: Counter[str] = Counter()
    for each in labelled:
        if each.piece.size == size and each.piece.born != BEFORE:
            source = each.source
            lines["no line" if source is None else f"{source.file}:{source.line}"] += 1
    return {
        "bytes": size,
        "allocated": sum(lines.values()),
        "live_at_peak": sum(each.piece.size == size for each in live),
        "lines": dict(lines.most_common(5)),
    }


def _by_category(live: Iterable[Labelled]) -> dict[str, int]:
    totals = dict.fromkeys(CATEGORIES, 0)
    for each in live:
        totals[each.category] += each.piece.block_bytes
    return {str(name): count for name, count in totals.items()}


def _sum(members: Sequence[Labelled]) -> dict[str, int]:
    return {
        "bytes": sum(each.piece.block_bytes for each in members),
        "count": len(members),
    }


def _place(each: Labelled) -> dict[str, Any]:
    source = each.source
    if source is None:
        return {"file": None, "line": None, "function": None}
    return {"file": source.file, "line": source.line, "function": source.function}


def _most_first(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(rows, key=lambda row: -row["bytes"])[:MAX_ROWS]


def _phase(span: Span, totals: Sequence[int], start: int) -> dict[str, Any]:
    within = totals[span.start - BEFORE : span.end - BEFORE + 1]
    return {
        "name": span.name,
        "first_event": span.start - start,
        "last_event": span.end - start,
        "peak_bytes": max(within),
        "end_bytes": within[-1],
    }


def _phase_at(position: int, phases: Sequence[Span]) -> str:
    """The phase of a position; the mark before a phase belongs to it."""
    return next(span.name for span in phases if span.start <= position <= span.end)


def _timeline(
    labelled: Sequence[Labelled], replayed: Replay, start: int, end: int
) -> dict[str, Any]:
    """Active bytes by category at the moments that outline the curve."""
    totals = replayed.totals(lambda piece: piece.block_bytes)
    kept = kept_positions(totals[start - BEFORE : end - BEFORE + 1], MAX_VERTICES)
    categories = {}
    for category in CATEGORIES:
        pieces = [each.piece for each in labelled if each.category == category]
        curve = running_totals(pieces, replayed.length, lambda piece: piece.block_bytes)
        values = [curve[position + start - BEFORE] for position in kept]
        if any(values):
            categories[str(category)] = values
    return {"event": kept, "bytes": categories}
