"""The four collectives that training needs, started now and waited for later.

A collective is worth overlapping only if the caller gets the processor back at once, so each
function here starts one and returns a `Pending`; nothing may be read from, or written to, the
tensors involved until `wait` returns. On a GPU with NCCL `wait` blocks no host: it makes the
current stream wait for the stream that communicates. On gloo it blocks the calling thread.

Where the mean is taken matters twice. NCCL averages by itself, for free. Gloo adds; the sum is
divided afterwards, once, so that the mean has one rounding more than the sum, and two ranks (a
division by two is exact) give the same bits as one process that adds both halves of a batch.

Torch 2.13 renamed the collectives that work on one large tensor and warns at the old names; the
new ones do not exist in 2.11.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Group = dist.ProcessGroup | None
"""The ranks that take part; None stands for all of them."""


@dataclass
class Pending:
    """A collective under way. `wait` once before touching its tensors."""

    work: dist.Work
    result: Tensor
    divisor: int = 1
    """What remains to be divided by where the backend cannot average."""
    source: Tensor | None = None
    """What is being sent, where that is another tensor: kept alive until it has left."""

    def wait(self, dtype: torch.dtype | None = None) -> Tensor:
        """The result, ready for what comes next; in a wider type, and divided there, if given."""
        self.work.wait()
        self.source = None
        result = self.result if dtype is None else self.result.to(dtype)
        return result if self.divisor == 1 else result.div_(self.divisor)


def start_mean_all_reduce(buffer: Tensor, group: Group) -> Pending:
    """Replace `buffer` on every rank by the mean over ranks."""
    operation, divisor = _mean(buffer.device, group)
    work = dist.all_reduce(buffer, op=operation, group=group, async_op=True)
    return Pending(_started(work), buffer, divisor)


def start_mean_reduce_scatter(part: Tensor, whole: Tensor, group: Group) -> Pending:
    """Into `part`: the mean over ranks of the rank-th equal piece of `whole`."""
    operation, divisor = _mean(whole.device, group)
    reduce_scatter = _renamed("reduce_scatter_single", "reduce_scatter_tensor")
    work = reduce_scatter(part, whole, op=operation, group=group, async_op=True)
    return Pending(_started(work), part, divisor, whole)


def start_all_gather(whole: Tensor, part: Tensor, group: Group) -> Pending:
    """Into `whole`: the parts of all ranks, one after the other."""
    all_gather = _renamed("all_gather_single", "all_gather_into_tensor")
    work = all_gather(whole, part, group=group, async_op=True)
    return Pending(_started(work), whole, source=part)


def start_broadcast(buffer: Tensor, source: int, group: Group) -> Pending:
    """Into `buffer` everywhere: what `source`, a rank of the group, has in it."""
    work = dist.broadcast(buffer, group_src=source, group=group, async_op=True)
    return Pending(_started(work), buffer)


def backend_of(device: torch.device, group: Group) -> str:
    """The backend that carries tensors of this device: a group may have one for each."""
    by_device = dict(pair.split(":") for pair in dist.get_backend_config(group).split(","))
    return by_device.get(device.type, "")


def _mean(device: torch.device, group: Group) -> tuple[dist.ReduceOp.RedOpType, int]:
    """The operation for a mean on this backend, and what is left to divide by."""
    if backend_of(device, group) == "nccl":
        return dist.ReduceOp.AVG, 1
    return dist.ReduceOp.SUM, dist.get_world_size(group)


def _renamed(new: str, old: str) -> Callable[..., Any]:
    """The collective by its new name where torch has it, else by its old one."""
    function: Callable[..., Any] = getattr(dist, new if hasattr(dist, new) else old)
    return function


def _started(work: dist.Work | None) -> dist.Work:
    """Torch hands no work to a process that is not in the group; that cannot be meant here."""
    if work is None:
        raise ValueError("process_group: this process is not a member; only members may take part")
    return work
