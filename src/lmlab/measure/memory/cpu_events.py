"""The history of a CPU step, from the memory events of torch's profiler.

A CPU has no caching allocator and keeps no book, but the profiler sees every allocation of a
tensor's storage as an event inside the operator that made it, or inside the node of autograd that
ran it. Of blocks that are older than the profile only their free is seen; what was there before is
told by whoever knows the tensors. The profiler could note call stacks too, but starting that takes
seconds; the observer of the forward pass notes its lines for next to nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch._C._profiler import _EventType

from lmlab.measure.memory.history import Block, Event, History

AUTOGRAD_NODE = "autograd::engine::evaluate_function: "
OPERATOR = "aten::"


def history_of(profile: torch.profiler.profile, live_at_end: Sequence[Block]) -> History:
    """Allocations and frees on the CPU in the order of their time."""
    tree = profile.profiler.kineto_results.experimental_event_tree()  # type: ignore[union-attr]
    memory = [
        node
        for node in _walk(tree)
        if node.tag == _EventType.Allocation and node.extra_fields.device.type == "cpu"
    ]
    memory.sort(key=lambda node: node.start_time_ns)
    start_ns = memory[0].start_time_ns if memory else 0
    return History(events=[_event(node, start_ns) for node in memory], live_at_end=live_at_end)


def _walk(roots: Iterable[Any]) -> Iterator[Any]:
    waiting = list(roots)
    while waiting:
        node = waiting.pop()
        yield node
        waiting.extend(node.children)


def _event(node: Any, start_ns: int) -> Event:
    size = node.extra_fields.alloc_size
    return Event(
        kind="alloc" if size > 0 else "free",
        address=node.extra_fields.ptr,
        size=abs(size),
        time_us=(node.start_time_ns - start_ns) / 1e3,
        operation=operation_of(_names_of_ancestors(node)) if size > 0 else "",
    )


def _names_of_ancestors(node: Any) -> Iterator[str]:
    """Innermost first."""
    while (node := node.parent) is not None:
        yield node.name


def operation_of(names: Iterable[str]) -> str:
    """What the program called: autograd's node, or the outermost operator around the allocation."""
    operator = ""
    for name in names:
        if name.startswith(AUTOGRAD_NODE):
            return name.removeprefix(AUTOGRAD_NODE)
        if name.startswith(OPERATOR):
            operator = name.removeprefix(OPERATOR)
    return operator
