"""The four collectives that training needs, started now and waited for later.

A collective is worth overlapping only if the caller gets the processor back at once, so each
function here starts one and returns a `Pending`; nothing may be read from, or written to, the
tensors involved until `wait` returns. On a GPU with NCCL `wait` blocks no host: it makes the
current stream wait for the stream that communicates. On gloo it blocks the calling thread.

Means are taken by the backend. NCCL divides what each rank sends and adds; gloo adds and then
divides. On two ranks, where the division is exact, the result has the bits of one process that adds
both halves of a batch. Gloo divides in the thread that communicates, hidden like the rest; but when
the tensors are a GPU's, that is a division on the host of what the GPU divides in no time, and its
cores are what gloo needs for the messages themselves. There the sum comes back and the GPU divides
it. Gloo has no reduce-scatter of its own: torch makes it of an all-reduce, at twice the bytes.

Torch 2.13 renamed the collectives that work on one large tensor and warns at the old names; the
new ones do not exist in 2.11.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor

Group = dist.ProcessGroup | None
"""The ranks that take part; None stands for all of them."""


@dataclass
class Pending:
    """A collective under way. `wait` before touching its tensors."""

    work: dist.Work
    result: Tensor
    source: Tensor | None = None
    """What is being sent, where that is another tensor: kept alive until it has left."""
    divisor: int = 1
    """What the result is still to be divided by."""

    def wait(self) -> Tensor:
        """The result, ready for whatever the current stream (or thread) does next."""
        self.work.wait()
        self.source = None
        if self.divisor != 1:
            self.result.div_(self.divisor)
            self.divisor = 1
        return self.result


def start_mean_all_reduce(buffer: Tensor, group: Group) -> Pending:
    """Replace `buffer` on every rank by the mean over ranks."""
    operation, divisor = _mean(buffer, group)
    work = dist.all_reduce(buffer, op=operation, group=group, async_op=True)
    return Pending(_started(work), buffer, divisor=divisor)


def start_mean_reduce_scatter(part: Tensor, whole: Tensor, group: Group) -> Pending:
    """Into `part`: the mean over ranks of the rank-th equal piece of `whole`."""
    reduce_scatter = _renamed("reduce_scatter_single", "reduce_scatter_tensor")
    operation, divisor = _mean(whole, group)
    work = reduce_scatter(part, whole, op=operation, group=group, async_op=True)
    return Pending(_started(work), part, whole, divisor)


def start_all_gather(whole: Tensor, part: Tensor, group: Group) -> Pending:
    """Into `whole`: the parts of all ranks, one after the other."""
    all_gather = _renamed("all_gather_single", "all_gather_into_tensor")
    work = all_gather(whole, part, group=group, async_op=True)
    return Pending(_started(work), whole, part)


def start_broadcast(buffer: Tensor, source: int, group: Group) -> Pending:
    """Into `buffer` everywhere: what `source`, a rank of the group, has in it."""
    work = dist.broadcast(buffer, group_src=source, group=group, async_op=True)
    return Pending(_started(work), buffer)


def _mean(tensor: Tensor, group: Group) -> tuple[dist.ReduceOp.RedOpType, int]:
    """What the backend is asked for, and what its result is divided by, to get a mean."""
    if tensor.is_cuda and dist.get_backend(group) == "gloo":
        return dist.ReduceOp.SUM, dist.get_world_size(group)
    return dist.ReduceOp.AVG, 1


def _renamed(new: str, old: str) -> Callable[..., Any]:
    """The collective by its new name where torch has it, else by its old one."""
    function: Callable[..., Any] = getattr(dist, new if hasattr(dist, new) else old)
    return function


def _started(work: dist.Work | None) -> dist.Work:
    """Torch hands no work to a process that is not in the group; that cannot be meant here."""
    if work is None:
        raise ValueError("process_group: this process is not a member; only members may take part")
    return work
