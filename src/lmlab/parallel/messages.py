"""Many tensors, few messages: broadcasting a list of tensors in large flat pieces.

A message costs a latency and its bytes over the bandwidth. A norm's weight of 4 kB is all latency,
and a model has hundreds, so tensors of one type are laid side by side in a buffer and sent as one.
Packing costs a copy at each end. A tensor that fills a message by itself gains nothing from that
and is sent from where it lies.

Messages are capped and only a few are under way at a time: without either, sending a model back
to its ranks would need a second model's worth of memory.
"""

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from lmlab.parallel.collectives import Group, start_broadcast

MESSAGE_BYTES = 256 * 2**20
"""A message is closed before it grows past this: far above where latency counts on any link."""

UNDER_WAY = 2
"""Messages sent and not yet waited for: one that travels while the one before is unpacked."""


T = TypeVar("T", bound=Tensor)


def in_messages(tensors: Iterable[T], limit_bytes: float = MESSAGE_BYTES) -> list[list[T]]:
    """Cut a list into runs of one type and device that stay within a number of bytes.

    Order is kept among tensors of one type. One tensor larger than the limit is a run by itself.
    """
    return [run for kind in by_kind(tensors) for run in _runs(kind, limit_bytes)]


def by_kind(tensors: Iterable[T]) -> list[list[T]]:
    """Tensors that one message could hold: those of one type on one device, in order."""
    kinds: dict[tuple[torch.dtype, torch.device], list[T]] = defaultdict(list)
    for tensor in tensors:
        kinds[tensor.dtype, tensor.device].append(tensor)
    return list(kinds.values())


def _runs(tensors: Sequence[T], limit_bytes: float) -> Iterator[list[T]]:
    """Consecutive tensors, as many at a time as stay within the limit."""
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


class Broadcast:
    """One message under way: the tensors of one rank, to all others."""

    def __init__(self, tensors: Sequence[Tensor], source: int, group: Group) -> None:
        self._tensors = [tensor.detach() for tensor in tensors]
        self._sending = dist.get_rank(group) == source
        self._packed = len(tensors) > 1 or not tensors[0].is_contiguous()
        buffer = self._buffer() if self._packed else self._tensors[0]
        self._pending = start_broadcast(buffer, source, group)

    def _buffer(self) -> Tensor:
        """Filled where the message comes from, room for it elsewhere."""
        if self._sending:
            return torch.cat([tensor.reshape(-1) for tensor in self._tensors])
        return self._tensors[0].new_empty(sum(tensor.numel() for tensor in self._tensors))

    def wait(self) -> None:
        """Until the tensors hold what the source had in them."""
        buffer = self._pending.wait()
        if self._packed and not self._sending:
            pieces = buffer.split([tensor.numel() for tensor in self._tensors])
            for tensor, piece in zip(self._tensors, pieces, strict=True):
                tensor.copy_(piece.view(tensor.shape))


def broadcast_all(messages: Iterable[tuple[Sequence[Tensor], int]], group: Group) -> None:
    """Send messages, each given as its tensors and the rank that has them; all ranks call this."""
    under_way: deque[Broadcast] = deque()
    for tensors, source in messages:
        under_way.append(Broadcast(tensors, source, group))
        if len(under_way) == UNDER_WAY:
            under_way.popleft().wait()
    for broadcast in under_way:
        broadcast.wait()


def broadcast_from_first_rank(tensors: Iterable[Tensor], group: Group) -> None:
    """Make tensors what rank 0 of the group has in them."""
    broadcast_all(((run, 0) for run in in_messages(tensors)), group)
