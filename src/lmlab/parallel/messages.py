"""Many tensors in few messages.

A message costs its latency plus its bytes over the bandwidth. A norm weight of 4 kB is all latency,
and a model has hundreds of them, so tensors of one dtype are packed into a flat buffer and sent
together.

Parameters are broadcast in messages of limited size, few of them in flight at a time; otherwise
broadcasting a model would need memory for a second copy.

Gradients live in their buffer, a `Bucket`: each parameter's `.grad` is a view into it, so messages
need no packing and gradients are in memory once. Autograd accumulates into an existing view in
place. After `zero_grad(set_to_none=True)` it creates a new tensor; a hook immediately copies that
into the buffer and restores the view.

A parameter without a gradient here may have one on another rank; this rank then contributes zeros.
If no rank has one, `.grad` must stay None, because an optimizer would decay a parameter whose
gradient is zero. So the buffer ends in one flag per parameter, whose mean is zero only if no rank
has a gradient. Reading flags synchronizes host and GPU, so only ranks missing a gradient do it.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lmlab.parallel.collectives import Pending, start_broadcast, start_mean_all_reduce

MESSAGE_BYTES = 256 * 2**20
"""Upper limit of a message: far above the size where latency matters on any link."""
IN_FLIGHT = 2
"""Messages in flight: one is sent while the previous one is unpacked."""
T = TypeVar("T", bound=Tensor)


def coalesce(tensors: Iterable[T], limit_bytes: float = MESSAGE_BYTES) -> list[list[T]]:
    """Split tensors into messages of one dtype and device of at most `limit_bytes` each.

    Order is preserved within a dtype and device. A tensor over the limit gets its own message.
    """
    messages: list[list[T]] = []
    for kind in by_dtype_and_device(tensors):
        room = float("-inf")
        for tensor in kind:
            if tensor.nbytes > room:
                messages.append([])
                room = limit_bytes
            messages[-1].append(tensor)
            room -= tensor.nbytes
    return messages


def in_buckets(parameters: Sequence[nn.Parameter], limit_bytes: float) -> list[list[nn.Parameter]]:
    """Split parameters, last to first, into buckets in the order in which backward completes them.

    As in torch's DistributedDataParallel, a bucket is closed by the parameter that reaches the
    limit, so it may exceed the limit by less than one parameter.
    """
    backwards = list(reversed(parameters))
    buckets: list[list[nn.Parameter]] = []
    for kind in by_dtype_and_device(backwards):
        filled = float("inf")
        for parameter in kind:
            if filled >= limit_bytes:
                buckets.append([])
                filled = 0
            buckets[-1].append(parameter)
            filled += parameter.nbytes
    ready_order = {parameter: index for index, parameter in enumerate(backwards)}
    return sorted(buckets, key=lambda bucket: ready_order[bucket[-1]])


def by_dtype_and_device(tensors: Iterable[T]) -> list[list[T]]:
    """Group tensors that can share a buffer, preserving their order."""
    kinds: dict[tuple[torch.dtype, torch.device], list[T]] = defaultdict(list)
    for tensor in tensors:
        kinds[tensor.dtype, tensor.device].append(tensor)
    return list(kinds.values())


def broadcast_coalesced(messages: Iterable[tuple[Sequence[Tensor], int]]) -> None:
    """Broadcast messages, each a pair of tensors and source rank; all ranks must call this."""
    in_flight: deque[Callable[[], object]] = deque()
    for tensors, source in messages:
        in_flight.append(_start_message(tensors, source))
        if len(in_flight) == IN_FLIGHT:
            in_flight.popleft()()
    for finish in in_flight:
        finish()


def broadcast_from_rank_0(tensors: Iterable[Tensor]) -> None:
    """Overwrite tensors on all ranks with those of rank 0."""
    broadcast_coalesced((message, 0) for message in coalesce(tensors))


def _start_message(tensors: Sequence[Tensor], source: int) -> Callable[[], object]:
    """Start a broadcast, in place for one contiguous tensor; returns a function to finish it."""
    tensors = [tensor.detach() for tensor in tensors]
    if len(tensors) == 1 and tensors[0].is_contiguous():
        return start_broadcast(tensors[0], source).wait
    sizes = [tensor.numel() for tensor in tensors]
    sends = dist.get_rank() == source
    packed = (
        torch.cat([t.reshape(-1) for t in tensors]) if sends else tensors[0].new_empty(sum(sizes))
    )
    pending = start_broadcast(packed, source)

    def finish() -> None:
        pending.wait()
        if not sends:
            for tensor, piece in zip(tensors, packed.split(sizes), strict=True):
                tensor.copy_(piece.view(tensor.shape))

    return finish


def check_still_frozen(frozen: Iterable[nn.Parameter]) -> None:
    """Raise if a parameter was unfrozen after wrapping: it is never sent, so ranks diverge."""
    if any(parameter.requires_grad for parameter in frozen):
        raise ValueError(
            "requires_grad must be set before wrapping, got True on a parameter that was frozen"
        )


def check_dense(gradient: Tensor) -> None:
    """Raise for a sparse gradient, which a flat buffer cannot hold."""
    if gradient.is_sparse:
        raise ValueError(
            f"gradient must be dense, got a sparse one of shape {tuple(gradient.shape)};"
            " use Embedding(sparse=False)"
        )


class Bucket:
    """The gradients of parameters of one dtype on one device."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = list(parameters)
        sizes = [parameter.numel() for parameter in self.parameters]
        self.buffer = torch.zeros(
            sum(sizes) + len(sizes), dtype=parameters[0].dtype, device=parameters[0].device
        )
        *slices, self._has_gradient = self.buffer.split([*sizes, len(sizes)])
        self._views: dict[nn.Parameter, Tensor] = {
            parameter: piece.view(parameter.shape)
            for parameter, piece in zip(self.parameters, slices, strict=True)
        }
        self._pending: Pending | None = None
        self._missing: list[int] = []

    @torch.no_grad()
    def adopt(self, parameter: nn.Parameter) -> None:
        """Move a gradient that autograd has created into the buffer."""
        view = self._views[parameter]
        gradient = parameter.grad
        if gradient is None or gradient is view:
            return
        check_dense(gradient)
        view.copy_(gradient)
        parameter.grad = view

    @torch.no_grad()
    def start(self) -> None:
        """Start averaging; gradients must not be touched until `wait`."""
        self.wait()
        for parameter in self.parameters:
            self.adopt(parameter)
        self._missing = [i for i, p in enumerate(self.parameters) if p.grad is None]
        self._has_gradient.fill_(1.0)
        for index in self._missing:
            self._has_gradient[index] = 0.0
            self._views[self.parameters[index]].zero_()
        self._pending = start_mean_all_reduce(self.buffer)

    @torch.no_grad()
    def wait(self) -> None:
        """Finish averaging, if it was started: every gradient is then the mean over ranks."""
        if self._pending is None:
            return
        self._pending.wait()
        self._pending = None
        if not self._missing:
            return
        anywhere = self._has_gradient.tolist()
        for index in self._missing:
            if anywhere[index] != 0.0:
                parameter = self.parameters[index]
                parameter.grad = self._views[parameter]
