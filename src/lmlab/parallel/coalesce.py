"""Many tensors in few messages.

A message costs a latency plus its bytes over the bandwidth. A norm weight of 4 kB is all latency,
and a model has hundreds of them, so tensors of one dtype are packed into a flat buffer and sent
together. Message size and messages in flight are limited; otherwise broadcasting a model would take
the memory of a second one.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from lmlab.parallel.collectives import Group, start_broadcast

MESSAGE_BYTES = 256 * 2**20
"""Upper limit of a message: far above the size where latency matters on any link."""
IN_FLIGHT = 2
"""Messages in flight: one is sent while the previous one is unpacked."""
T = TypeVar("T", bound=Tensor)


def coalesce(tensors: Iterable[T], limit_bytes: float = MESSAGE_BYTES) -> list[list[T]]:
    """Split tensors into messages of one dtype and device of at most `limit_bytes` each.

    Order is preserved within a dtype. A tensor larger than the limit is a message by itself.
    """
    kinds = by_dtype_and_device(tensors)
    return [message for kind in kinds for message in _runs(kind, limit_bytes)]


def by_dtype_and_device(tensors: Iterable[T]) -> list[list[T]]:
    """Tensors that can share a buffer, in order."""
    kinds: dict[tuple[torch.dtype, torch.device], list[T]] = defaultdict(list)
    for tensor in tensors:
        kinds[tensor.dtype, tensor.device].append(tensor)
    return list(kinds.values())


def _runs(tensors: Sequence[T], limit_bytes: float) -> Iterator[list[T]]:
    run: list[T] = []
    filled = 0
    for tensor in tensors:
        if run and filled + tensor.nbytes > limit_bytes:
            yield run
            run, filled = [], 0
        run.append(tensor)
        filled += tensor.nbytes
    if run:
        yield run


def broadcast_coalesced(messages: Iterable[tuple[Sequence[Tensor], int]], group: Group) -> None:
    """Broadcast messages, each given as its tensors and its source rank; all ranks call this."""
    in_flight: deque[Callable[[], object]] = deque()
    for tensors, source in messages:
        in_flight.append(_start_message(tensors, source, group))
        if len(in_flight) == IN_FLIGHT:
            in_flight.popleft()()
    for finish in in_flight:
        finish()


def broadcast_from_rank_0(tensors: Iterable[Tensor], group: Group) -> None:
    """Overwrite tensors on all ranks with those of rank 0."""
    broadcast_coalesced(((message, 0) for message in coalesce(tensors)), group)


def _start_message(tensors: Sequence[Tensor], source: int, group: Group) -> Callable[[], object]:
    """Start a broadcast, without a copy if it is one tensor; returns what completes it."""
    tensors = [tensor.detach() for tensor in tensors]
    if len(tensors) == 1 and tensors[0].is_contiguous():
        return start_broadcast(tensors[0], source, group).wait
    sizes = [tensor.numel() for tensor in tensors]
    sends = dist.get_rank(group) == source
    packed = (
        torch.cat([t.reshape(-1) for t in tensors]) if sends else tensors[0].new_empty(sum(sizes))
    )
    pending = start_broadcast(packed, source, group)

    def finish() -> None:
        pending.wait()
        if not sends:
            for tensor, piece in zip(tensors, packed.split(sizes), strict=True):
                tensor.copy_(piece.view(tensor.shape))

    return finish
