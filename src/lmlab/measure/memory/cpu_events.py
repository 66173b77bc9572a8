"""The history of a CPU step, from the memory events of torch's profiler.

A CPU has no caching allocator and no record of allocations, but the profiler sees every allocation
of a tensor's storage as an event inside the operator or autograd node that made it. Of blocks older
than the profile it sees only the free; the caller supplies the tensors that existed before. The
profiler could record call stacks too, but starting that takes seconds; the observer of the forward
pass notes source lines for next to nothing.
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
    """Allocations and frees on the CPU in order of time."""
    tree = profile.profiler.kineto_results.experimental_event_tree()  # type: ignore[union-attr]
    memory = [
        node
        for node in _all_nodes(tree)
        if node.tag == _EventType.Allocation and node.extra_fields.device.type == "cpu"
    ]
    memory.sort(key=lambda node: node.start_time_ns)
    return History(events=[_event(node) for node in memory], live_at_end=live_at_end)


def _all_nodes(roots: Iterable[Any]) -> Iterator[Any]:
    stack = list(roots)
    while stack:
        node = stack.pop()
        yield node
        stack.extend(node.children)


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
