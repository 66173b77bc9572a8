"""Sharded matrices that are communicated together: one all-gather, one reduce-scatter.

Sent matrix by matrix, a Transformer mostly waits for latencies. Matrices that are used soon after
each other therefore share messages:

    gather           shards are packed into one message; each matrix is then copied out of what
                     arrives, where its rows are interleaved with those of the others
    reduce-scatter   gradients are packed by destination rank; a rank receives its rows of each

A group of one matrix is sent and received in place, without copies.

`Pending.wait` orders the current stream after the backend's, so a copy enqueued next reads what has
arrived, and the receive buffer can be freed once the copy is enqueued. The matrices get their
memory only then, so a group in flight is in memory once.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from lmlab.parallel.collectives import Pending, start_all_gather, start_mean_reduce_scatter
from lmlab.parallel.fsdp_param import FSDPParam


class FSDPGroup:
    """Matrices of one dtype and device, all trainable or all frozen, gathered together."""

    def __init__(
        self, name: str, params: Sequence[FSDPParam], block: nn.Module | None = None
    ) -> None:
        self.name = name
        self.params = list(params)
        self._params_of: dict[nn.Module, list[FSDPParam]] = {}
        for param in params:
            for module, _ in param.locations:
                self._params_of.setdefault(module, []).append(param)
        if block is not None:
            self._params_of[block] = self.params
        self.modules = list(self._params_of)
        self.running: set[nn.Module] = set()
        """Modules that are computing with the full matrices now."""
        self.installed = False
        """Whether modules hold the full matrices; otherwise they hold shards."""
        self.trainable = params[0].full.requires_grad
        self.tied = any(len(param.locations) > 1 for param in params)
        self._sizes = [param.padded_shard_size for param in params]
        self._gathering: Pending | None = None
        self._reducing: Pending | None = None
        self._sent: list[FSDPParam] = []

    @property
    def gathered(self) -> bool:
        """Whether the full matrices are in memory or in flight."""
        return self._gathering is not None or any(param.allocated for param in self.params)

    @property
    def with_gradient(self) -> list[FSDPParam]:
        """Matrices whose gradient is ready and has not been sent."""
        return [param for param in self.params if param.full.grad is not None]

    def copy_if_view(self, module: nn.Module, output: Tensor) -> Tensor:
        """An output, copied if it is a view of a full matrix, which will be freed."""
        is_view = any(param.shares_memory(output) for param in self._params_of[module])
        return output.clone() if is_view else output

    @torch.no_grad()
    def start_gather(self) -> None:
        """Start the all-gather, unless the matrices are gathered already."""
        if self.gathered:
            return
        for param in self.params:
            param.check_unchanged()
        first = self.params[0]
        if len(self.params) == 1:
            first.allocate()
            buffer, shards = first.padded, first.padded_shard(first.padded.dtype)
        else:
            shards = self._packed_shards()
            buffer = shards.new_empty(first.world_size * shards.numel())
        self._gathering = start_all_gather(buffer, shards, first.group)

    def finish_gather(self) -> None:
        """Wait for the full matrices and install them."""
        self.start_gather()
        if self._gathering is not None:
            self._unpack(self._gathering.wait())
            self._gathering = None
        for param in self.params:
            param.install(param.full)
        self.installed = True

    def install_shards(self) -> None:
        """Install the shards, without freeing the full matrices."""
        for param in self.params:
            param.install(param.shard)
        self.installed = False

    def free(self) -> None:
        """Install the shards and free the full matrices; waits if they are being written to."""
        if not self.gathered:
            return
        if self._gathering is not None:
            self._gathering.wait()
            self._gathering = None
        self.install_shards()
        for param in self.params:
            param.free()

    @torch.no_grad()
    def start_reduce(self) -> None:
        """Start the reduce-scatter of the gradients that are ready."""
        self.finish_reduce()
        self._sent = self.with_gradient
        gradients = [param.pop_gradient().view(param.world_size, -1) for param in self._sent]
        packed = gradients[0] if len(gradients) == 1 else torch.cat(gradients, dim=1)
        del gradients  # would stay in memory while the message is in flight
        output = packed.new_empty(packed.shape[1])
        self._reducing = start_mean_reduce_scatter(output, packed.view(-1), self.params[0].group)

    @torch.no_grad()
    def finish_reduce(self) -> None:
        """Add mean gradients in flight, if any, to the gradients of the shards."""
        if self._reducing is None:
            return
        # One cast for all. The gradient of a shard is a view of the result, not a copy.
        mean = self._reducing.wait().to(self.params[0].shard.dtype)
        self._reducing = None
        pieces = mean.split([param.padded_shard_size for param in self._sent])
        for param, piece in zip(self._sent, pieces, strict=True):
            own = param.without_padding(piece)
            param.shard.grad = own if param.shard.grad is None else param.shard.grad.add_(own)

    def _packed_shards(self) -> Tensor:
        """What this rank sends: its shards in the compute dtype."""
        packed = self.params[0].padded.new_empty(sum(self._sizes))
        pieces = zip(self.params, packed.split(self._sizes), strict=True)
        targets = [param.without_padding(piece) for param, piece in pieces]
        torch._foreach_copy_(targets, [param.shard.detach() for param in self.params])
        return packed

    @torch.no_grad()
    def _unpack(self, buffer: Tensor) -> None:
        """Copy each matrix out of the receive buffer, unless it was received in place."""
        if len(self.params) == 1:
            return
        for param in self.params:
            param.allocate()
        by_rank = buffer.view(self.params[0].world_size, -1)
        targets = [param.padded.view(param.world_size, -1) for param in self.params]
        torch.split_with_sizes_copy(by_rank, self._sizes, dim=1, out=targets)
