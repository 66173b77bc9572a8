"""Reduces a recording to the numbers and lists that a page needs, with a category for every byte.

Where possible, an allocation's category follows from its identity: at every mark the caller lists
the addresses of weights, gradients and optimizer state, and the allocation live at such an address
is that tensor. The observer identifies autocast's copies of weights. Everything else is categorized
by the phase in which it was made:

    parameters       the weights
    gradients        the .grad of some weight after backward
    optimizer_state  what the optimizer keeps between steps
    weight_copies    16-bit copies of weights that autocast makes and keeps for the pass
    activations      made in forward and live when it ends: saved for backward. Without a graph
                     nothing is saved, and all operator outputs count as activations
    workspace        everything else that a step makes: temporaries of forward, gradients of
                     activations, the optimizer's temporaries; and what a library keeps between
                     steps (cuBLAS has a workspace that no tensor owns)
    other            inputs, buffers of the model, the marks of the recording

Bytes are block sizes, as the allocator counts them; the peak of requested bytes is given as well.
Repeated allocations (the w1 of every layer) form one row with a count; otherwise the list of the
largest allocations would show one matrix thirty times.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from lmlab.measure.memory.history import active_bytes, live_at, replay
from lmlab.measure.memory.observer import NewStorage, source_of
from lmlab.measure.memory.recorder import KnownTensor, Recording, Span
from lmlab.measure.records import plain_rows

CATEGORIES = (
    *("parameters", "optimizer_state", "gradients", "weight_copies"),
    *("activations", "workspace", "other"),
)
"""From permanent to temporary: the order in which figures stack them."""
Bytes = npt.NDArray[np.int64]
MAX_VERTICES = 240
MAX_ROWS = 12
LAYER_NUMBER = re.compile(r"\.\d+\.")
SOURCE = ["file", "line", "function"]


def summarize(
    recording: Recording,
    *,
    keeps_graph: bool,
    stream_bytes: int,
    score_shape: tuple[int, ...] = (),
) -> dict[str, Any]:
    """Everything that a result stores about one recorded step."""
    labelled = label(recording, keeps_graph=keeps_graph)
    events = len(recording.history.events)
    start, end = recording.phases[0].start, recording.phases[-1].end
    totals = active_bytes(labelled, events)
    peak = start + int(totals[start : end + 1].argmax())
    live = live_at(labelled, peak if recording.out_of_memory is None else end)
    by_category = live.groupby("category")["block_bytes"].sum()
    in_phase = next(span.name for span in recording.phases if span.start <= peak <= span.end)
    return {
        "events": end - start,
        "history_cut": recording.history.dropped,
        "replayed_peak_bytes": int(totals[peak]),
        "requested_peak_bytes": int(active_bytes(labelled, events, of="size")[peak]),
        "peak_event": peak - start,
        "peak_phase": in_phase,  # `start` included: the peak may be at the first mark
        "live_categories": {name: int(by_category.get(name, 0)) for name in CATEGORIES},
        "live_scores": _activations_shaped(live, score_shape),
        "live_pieces": len(live),
        "live_lines": _by_line(live),
        "live_largest": _largest(live),
        "phases": [_phase(span, totals, start) for span in recording.phases],
        "timeline": _timeline(labelled, totals, start, end),
        **_tensors_of_size(labelled, live, stream_bytes),
    }


def label(recording: Recording, *, keeps_graph: bool) -> pd.DataFrame:
    """Every allocation with its category, its phase, what it is, and the file, line and function
    that made it; in order of birth."""
    allocations = replay(recording.history)
    known = _known(recording, allocations)
    storages = _storages(recording.observer.storages, allocations)
    labels = []
    row: Any
    for row in allocations.itertuples():
        tensor, storage = known.get(row.Index), storages.get(row.Index)
        phase = next((p for p in recording.phases if p.start < row.born <= p.end), None)
        if tensor is not None:
            category, what = tensor.category, tensor.name
        else:
            category = _inferred(row, phase, storage, keeps_graph)
            what = row.operation if storage is None else storage.label()
        source = source_of(row.frames) or (storage.source if storage else None)
        phase_name = "before" if phase is None else phase.name
        what = LAYER_NUMBER.sub(".*.", what)
        labels.append((category, phase_name, what, *(source or (None, None, None))))
    columns = ["category", "phase", "what", *SOURCE]
    return allocations.join(pd.DataFrame(labels, columns=columns, dtype=object))


def _inferred(
    allocation: Any, phase: Span | None, storage: NewStorage | None, keeps_graph: bool
) -> str:
    """Category of an allocation at no known address."""
    if phase is None or phase.name != "forward":
        return "workspace"
    if storage is not None and storage.copy_of is not None:
        return "weight_copies"
    saved = allocation.died > phase.end if keeps_graph else storage is not None
    return "activations" if saved else "workspace"


def _known(recording: Recording, allocations: pd.DataFrame) -> dict[Any, KnownTensor]:
    """Map allocation numbers to the known tensor at their address while they were live."""
    return {
        number: tensors[address]
        for position, tensors in recording.known
        for number, address in live_at(allocations, position)["address"].items()
        if address in tensors
    }


def _storages(storages: Iterable[NewStorage], allocations: pd.DataFrame) -> dict[Any, NewStorage]:
    """Map allocation numbers to observed storages; per address both come in the same order."""
    waiting: dict[int, list[Any]] = defaultdict(list)
    row: Any
    for row in allocations[allocations["born"] > 0].itertuples():
        waiting[row.address].append(row)
    found: dict[Any, NewStorage] = {}
    for storage in storages:
        rows = waiting[storage.address]
        match = next((row.Index for row in rows if row.size == storage.size), None)
        if match is not None:
            found[match] = storage
            waiting[storage.address] = [row for row in rows if row.Index > match]
    return found


def _by_line(live: pd.DataFrame) -> list[dict[str, Any]]:
    """Live bytes by source line, largest first; without a line, by phase."""
    live = live.assign(otherwise=live["phase"].mask(live["file"].notna()))
    rows = _grouped(live, [*SOURCE, "category", "otherwise"]).nlargest(MAX_ROWS, "bytes")
    return plain_rows(rows[["category", "phase", *SOURCE, "bytes", "count"]])


def _largest(live: pd.DataFrame) -> list[dict[str, Any]]:
    """The largest single allocations, equal ones as one row."""
    rows = _grouped(live, ["size", "category", "phase", "what", *SOURCE])
    rows = rows.sort_values(["size", "count"], ascending=False).head(MAX_ROWS)
    columns = ["each_bytes", "what", "category", "phase", *SOURCE, "bytes", "count"]
    return plain_rows(rows.rename(columns={"size": "each_bytes"})[columns])


def _grouped(live: pd.DataFrame, keys: list[str]) -> pd.DataFrame:
    """The first allocation of each group, with the bytes and the count of all."""
    blocks = live.groupby(keys, dropna=False)["block_bytes"]
    summed = live.assign(bytes=blocks.transform("sum"), count=blocks.transform("size"))
    return summed.drop_duplicates(keys)


def _activations_shaped(live: pd.DataFrame, shape: tuple[int, ...]) -> dict[str, int]:
    """Live bytes of activations of one shape by data type: the attention matrices that are kept."""
    activations = live[live["category"] == "activations"]
    # The format of `NewStorage.label`: operator, shape, type.
    described = rf"^\S+ {'×'.join(map(str, shape))} (\S+)"
    types = activations["what"].str.extract(described, expand=False)
    totals = activations.groupby(types, sort=False)["block_bytes"].sum()
    return {str(name): int(count) for name, count in totals.items()}


def _tensors_of_size(labelled: pd.DataFrame, live: pd.DataFrame, size: int) -> dict[str, Any]:
    """How many tensors of exactly this size were allocated, and where; how many are live."""
    made = labelled[(labelled["size"] == size) & (labelled["born"] > 0)]
    lines = Counter(
        "no line" if file is None else f"{file}:{line}"
        for file, line in zip(made["file"], made["line"], strict=True)
    )
    return {
        "stream_allocations": lines.total(),
        "stream_live": int((live["size"] == size).sum()),
        "stream_lines": dict(lines.most_common(5)),
    }


def _phase(span: Span, totals: Bytes, start: int) -> dict[str, Any]:
    within = totals[span.start : span.end + 1]
    return {
        "name": span.name,
        "first_event": span.start - start,
        "last_event": span.end - start,
        "peak_bytes": int(within.max()),
        "end_bytes": int(within[-1]),
    }


def _timeline(labelled: pd.DataFrame, totals: Bytes, start: int, end: int) -> dict[str, Any]:
    """Active bytes by category at the positions that outline the curve."""
    positions = outline(totals[start : end + 1].tolist(), MAX_VERTICES)
    categories = {}
    for category in CATEGORIES:
        own = labelled[labelled["category"] == category]
        curve = active_bytes(own, len(totals) - 1)[start:]
        if curve[positions].any():
            categories[category] = curve[positions].tolist()
    return {"event": positions, "bytes": categories}


def outline(totals: Sequence[int], max_vertices: int) -> list[int]:
    """Positions that outline a curve: its ends, and the minimum and maximum of every bucket. Simple
    subsampling would miss the peak, which is often one event wide."""
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
