"""Records the memory of one step, phase by phase, on a GPU or on a CPU.

Phases are delimited by marks: before each phase, and after the last, one byte is allocated and
held, and its event is a position in the history. This needs no clock and no annotations. At every
mark the caller also names the addresses it knows (weights, gradients, optimizer state), because an
address is meaningful only while its memory is live.

On a GPU the caching allocator records the history itself, with Python's call stack for each
allocation, in a buffer of limited length. On a CPU torch's profiler sees every allocation of a
tensor's storage as an event inside the operator or autograd node that made it. For blocks older
than the profile it sees only the free; the caller supplies the tensors that existed before. Its
call stacks take seconds to start, while the observer gets source lines almost for free. Never
record while a clock runs. Running out of memory ends the recording but is not an error: the history
then ends with the request that failed.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._C._profiler import _EventType
from torch.profiler._utils import traverse_dfs

from lmlab.measure.device import is_out_of_memory
from lmlab.measure.memory.history import Block, Event, History
from lmlab.measure.memory.observer import Observer, address_of
from lmlab.measure.memory.snapshot import history_of
from lmlab.measure.time_spent import measuring

# A train step of 48 layers has about 15,000 events.
MAX_ENTRIES = 400_000
AUTOGRAD_NODE = "autograd::engine::evaluate_function: "
OPERATOR = "aten::"

Run = Callable[[], None]


@dataclass(frozen=True, kw_only=True)
class KnownTensor:
    """A tensor that the caller can name."""

    category: str
    name: str
    size: int


@dataclass(frozen=True, kw_only=True)
class Span:
    """A phase among the events: after position `start`, up to and including `end`."""

    name: str
    start: int
    end: int


@dataclass(frozen=True, kw_only=True)
class Recording:
    """A step's history, divided into phases."""

    history: History
    phases: Sequence[Span]
    known: Sequence[tuple[int, Mapping[int, KnownTensor]]]
    """Positions, and the known tensors by address there."""
    observer: Observer
    out_of_memory: str | None = None  # the error message if memory ran out
    snapshot: Mapping[str, Any] | None = field(default=None, repr=False)
    """torch's own snapshot, for its viewer; None on a CPU."""


@measuring()
def record(
    phases: Sequence[tuple[str, Run]],
    *,
    device: torch.device,
    identify: Callable[[], Mapping[int, KnownTensor]],
) -> Recording:
    """Run the phases once and record memory, even if it runs out; `forward` is observed."""
    weights = {at: each.name for at, each in identify().items() if each.category == "parameters"}
    observer = Observer(weights)
    marks: list[Tensor] = []
    known: list[Mapping[int, KnownTensor]] = []
    out_of_memory = None

    def mark() -> None:
        marks.append(torch.empty(1, dtype=torch.uint8, device=device))
        own = KnownTensor(category="other", name="mark", size=1)
        known.append({**identify(), address_of(marks[-1]): own})

    source = _CachingAllocator(device) if device.type == "cuda" else _Profiler()
    try:
        with source:
            for name, run in phases:
                mark()
                with observer if name == "forward" else nullcontext():
                    run()
            mark()
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        out_of_memory = str(error)
        known.append(identify())
    history = source.history(known[-1])
    last = {(event.kind, event.address): n for n, event in enumerate(history.events, start=1)}
    try:
        positions = [last["alloc", address_of(each)] for each in marks]  # they are still live
    except KeyError as lost:
        raise RuntimeError("the history lacks a mark: the buffer was too short") from lost
    # If memory ran out, the last phase ends at the failed request; a driver error has no event.
    ends = [*positions[1:], last.get(("oom", 0), len(history.events))]
    return Recording(
        history=history,
        phases=[
            Span(name=name, start=start, end=end)
            for (name, _), start, end in zip(phases, positions, ends, strict=False)
        ],
        known=list(zip([*positions, len(history.events)], known, strict=False)),
        observer=observer,
        out_of_memory=out_of_memory,
        snapshot=source.snapshot,
    )


class _CachingAllocator:
    """The history that the CUDA caching allocator keeps."""

    def __init__(self, device: torch.device) -> None:
        self._index = device.index or 0
        self.snapshot: Mapping[str, Any] | None = None

    def __enter__(self) -> None:
        torch.cuda.memory._record_memory_history(
            "all", context="alloc", stacks="python", max_entries=MAX_ENTRIES
        )

    def __exit__(self, *exception: object) -> None:
        # Now, while an error's traceback still holds what was live.
        self.snapshot = torch.cuda.memory._snapshot()
        torch.cuda.memory._record_memory_history(None)

    def history(self, known: Mapping[int, KnownTensor]) -> History:
        assert self.snapshot is not None, "a history is read after the recording"
        return history_of(self.snapshot, self._index, max_entries=MAX_ENTRIES)


class _Profiler:
    """The profiler's memory events."""

    snapshot: Mapping[str, Any] | None = None

    def __init__(self) -> None:
        activities = [torch.profiler.ProfilerActivity.CPU]
        self._profile = torch.profiler.profile(activities=activities, profile_memory=True)

    def __enter__(self) -> None:
        self._profile.start()

    def __exit__(self, *exception: object) -> None:
        self._profile.stop()

    def history(self, known: Mapping[int, KnownTensor]) -> History:
        """Only the known tensors can be listed as live at the end."""
        blocks = [
            Block(address=address, size=tensor.size, block_bytes=tensor.size)
            for address, tensor in known.items()
        ]
        tree = self._profile.profiler.kineto_results.experimental_event_tree()  # type: ignore[union-attr]
        nodes = [
            node
            for node in traverse_dfs(tree)
            if node.tag == _EventType.Allocation and node.extra_fields.device.type == "cpu"
        ]
        nodes.sort(key=lambda node: node.start_time_ns)
        return History(events=[_event(node) for node in nodes], live_at_end=blocks)


def _event(node: Any) -> Event:
    size = node.extra_fields.alloc_size
    return Event(
        kind="alloc" if size > 0 else "free",
        address=node.extra_fields.ptr,
        size=abs(size),
        operation=_operation_of(node) if size > 0 else "",
    )


def _operation_of(node: Any) -> str:
    """The autograd node, or the outermost operator, around an allocation."""
    operator = ""
    while (node := node.parent) is not None:
        if node.name.startswith(AUTOGRAD_NODE):
            return str(node.name.removeprefix(AUTOGRAD_NODE))
        if node.name.startswith(OPERATOR):
            operator = node.name.removeprefix(OPERATOR)
    return operator
