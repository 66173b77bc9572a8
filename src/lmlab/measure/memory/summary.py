"""A recording reduced to the numbers and lists that a page needs.

Bytes are blocks, as the allocator counts them; the peak of requested bytes is given as well.
Allocations that repeat the same thing (the w1 of every layer) are one row with a count; otherwise
the list of largest allocations would be one matrix thirty times.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

from lmlab.measure.memory.categories import CATEGORIES, Labelled, label
from lmlab.measure.memory.recorder import Recording, Span
from lmlab.measure.memory.replay import BEFORE, Replay, replay, running_totals

MAX_VERTICES = 240
MAX_ROWS = 12
LAYER_NUMBER = re.compile(r"\.\d+\.")


def summarize(
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
    live = [each for each in labelled if each.allocation.is_live_at(moment)]
    totals = replayed.totals(lambda allocation: allocation.block_bytes)
    requested = replayed.totals(lambda allocation: allocation.size)
    return {
        "events": end - start,
        "history_cut": recording.history.dropped,
        "replayed_peak_bytes": totals[peak - BEFORE],
        "requested_peak_bytes": requested[peak - BEFORE],
        "peak_event": peak - start,
        "peak_phase": _phase_at(peak, recording.phases),
        "live_categories": _by_category(live),
        "live_scores": activations_shaped(live, score_shape),
        "live_pieces": len(live),
        "live_lines": by_line(live),
        "live_largest": largest(live),
        "phases": [_phase(span, totals, start) for span in recording.phases],
        "timeline": _timeline(labelled, replayed, start, end),
        **found_tensors(labelled, live, stream_bytes),
    }


def by_line(live: Iterable[Labelled]) -> list[dict[str, Any]]:
    """Live bytes by source line, largest first; without a line, by phase."""
    rows = _rows(live, lambda each: (each.source, each.category, not each.source and each.phase))
    for row in rows:
        del row["each_bytes"], row["what"]
    return sorted(rows, key=lambda row: -row["bytes"])[:MAX_ROWS]


def largest(live: Iterable[Labelled]) -> list[dict[str, Any]]:
    """The largest single allocations, equal ones as one row."""
    rows = _rows(
        live,
        lambda each: (each.allocation.size, each.category, each.phase, _what(each), each.source),
    )
    return sorted(rows, key=lambda row: (-row["each_bytes"], -row["count"]))[:MAX_ROWS]


def _rows(live: Iterable[Labelled], key: Callable[[Labelled], Hashable]) -> list[dict[str, Any]]:
    """One row per group: its first allocation, and the bytes and count of all."""
    groups: dict[Hashable, list[Labelled]] = defaultdict(list)
    for each in live:
        groups[key(each)].append(each)
    return [
        {
            "each_bytes": first.allocation.size,
            "what": _what(first),
            "category": first.category,
            "phase": first.phase,
            "file": first.source and first.source.file,
            "line": first.source and first.source.line,
            "function": first.source and first.source.function,
            "bytes": sum(each.allocation.block_bytes for each in members),
            "count": len(members),
        }
        for members in groups.values()
        for first in members[:1]
    ]


def _what(each: Labelled) -> str:
    return LAYER_NUMBER.sub(".*.", each.what)


def activations_shaped(live: Iterable[Labelled], shape: tuple[int, ...]) -> dict[str, int]:
    """Live bytes of activations of one shape by data type: what attention keeps of its square."""
    totals: Counter[str] = Counter()
    dimensions = "×".join(map(str, shape))
    for each in live:
        # What the observer writes: operator, shape, type.
        if each.category == "activations" and each.what.split(" ")[1:2] == [dimensions]:
            totals[each.what.split(" ")[2]] += each.allocation.block_bytes
    return dict(totals)


def found_tensors(
    labelled: Sequence[Labelled], live: Sequence[Labelled], size: int
) -> dict[str, Any]:
    """How often a tensor of exactly this size was allocated, is live at the peak, and where."""
    lines = Counter(
        "no line" if each.source is None else str(each.source)
        for each in labelled
        if each.allocation.size == size and each.allocation.born != BEFORE
    )
    return {
        "stream_allocations": lines.total(),
        "stream_live": sum(each.allocation.size == size for each in live),
        "stream_lines": dict(lines.most_common(5)),
    }


def _by_category(live: Iterable[Labelled]) -> dict[str, int]:
    totals = dict.fromkeys(CATEGORIES, 0)
    for each in live:
        totals[each.category] += each.allocation.block_bytes
    return totals


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
    """Active bytes by category at the positions that outline the curve."""
    totals = replayed.totals(lambda allocation: allocation.block_bytes)
    positions = outline(totals[start - BEFORE : end - BEFORE + 1], MAX_VERTICES)
    categories = {}
    for category in CATEGORIES:
        own = [each.allocation for each in labelled if each.category == category]
        curve = running_totals(own, replayed.length, lambda allocation: allocation.block_bytes)
        values = [curve[position + start - BEFORE] for position in positions]
        if any(values):
            categories[category] = values
    return {"event": positions, "bytes": categories}


def outline(totals: Sequence[int], max_vertices: int) -> list[int]:
    """Positions that outline a curve: its ends, and the lowest and highest of every bucket. Every
    hundredth event would miss the peak, which is often one event wide."""
    count = len(totals)
    if count <= max_vertices:
        return list(range(count))
    buckets = (max_vertices - 2) // 2
    chosen = {0, count - 1}
    for number in range(buckets):
        positions = range(number * count // buckets, (number + 1) * count // buckets)
        chosen.add(min(positions, key=totals.__getitem__))
        chosen.add(max(positions, key=totals.__getitem__))
    return sorted(chosen)
