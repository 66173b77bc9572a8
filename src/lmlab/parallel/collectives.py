"""Asynchronous collectives behind one interface for NCCL and gloo.

Each function starts a collective and returns a `Pending`. Its tensors must not be read or written
until `wait` returns. With NCCL, `wait` does not block the host: it makes the current stream wait
for the communication stream. With gloo it blocks the calling thread.

NCCL divides and then sums; gloo sums and then divides. With two ranks the division is exact, so the
result is bitwise identical to one process summing both halves of a batch. When gloo communicates
GPU tensors, the GPU divides, because the host cores are busy with messages. Gloo has no
reduce-scatter: torch emulates it with an all-reduce, at twice the bytes.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor


@dataclass
class Pending:
    """A collective in flight."""

    work: dist.Work
    result: Tensor
    source: Tensor | None = None
    """The tensor being sent, if it is not `result`: referenced until the collective is done."""
    divisor: int = 1
    """What `result` has yet to be divided by."""

    def wait(self) -> Tensor:
        """Wait for the result; it is safe to use on the current stream (or thread) afterwards."""
        self.work.wait()
        self.source = None
        if self.divisor != 1:
            self.result.div_(self.divisor)
            self.divisor = 1
        return self.result


def start_mean_all_reduce(buffer: Tensor) -> Pending:
    """Replace `buffer` on every rank by its mean over ranks."""
    operation, divisor = _mean(buffer)
    work = dist.all_reduce(buffer, op=operation, async_op=True)
    return Pending(work, buffer, divisor=divisor)


def start_mean_reduce_scatter(output: Tensor, buffer: Tensor) -> Pending:
    """Write this rank's slice of the mean of `buffer` over ranks to `output`."""
    reduce_scatter = _either("reduce_scatter_single", "reduce_scatter_tensor")
    operation, divisor = _mean(buffer)
    work = reduce_scatter(output, buffer, op=operation, async_op=True)
    return Pending(work, output, buffer, divisor)


def start_all_gather(output: Tensor, shard: Tensor) -> Pending:
    """Write the shards of all ranks to `output`, in rank order."""
    all_gather = _either("all_gather_single", "all_gather_into_tensor")
    return Pending(all_gather(output, shard, async_op=True), output, shard)


def start_broadcast(buffer: Tensor, source: int) -> Pending:
    """Copy `buffer` from the rank `source` to all others."""
    return Pending(dist.broadcast(buffer, src=source, async_op=True), buffer)


def _mean(tensor: Tensor) -> tuple[dist.ReduceOp.RedOpType, int]:
    """The reduction to request, and the divisor its result still needs to become a mean."""
    if tensor.is_cuda and dist.get_backend() == "gloo":
        return dist.ReduceOp.SUM, dist.get_world_size()
    return dist.ReduceOp.AVG, 1


def _either(new: str, old: str) -> Callable[..., Any]:
    """A single-tensor collective; torch 2.13 renamed them and warns about the old names."""
    function: Callable[..., Any] = getattr(dist, new if hasattr(dist, new) else old)
    return function
