"""Sharded matrices, and groups of them that are communicated together.

Each rank keeps some rows of a matrix as a parameter (`shard`, what the optimizer sees). For
communication, shards are padded to the same number of rows; in rank order they form the matrix.
Autograd saves the weight that a layer computed with, and so would keep every gathered matrix alive
from forward to backward. Therefore the full matrix is a single tensor (`full`, the leaf that
autograd knows) whose storage is resized to zero after use and refilled before backward reaches the
layer. It is written through an alias (`padded`, which includes the padding) with its own version
counter; otherwise autograd would report an in-place modification.

With one message per matrix, a Transformer would mostly wait on latency, so matrices that are used
close together share messages:

    gather           shards are packed into one message; each matrix is then copied out of the
                     receive buffer, which holds the shards of all matrices rank by rank
    reduce-scatter   gradients are packed by destination rank; a rank receives its rows of each

A group of one matrix is sent and received in place, without copies.

`Pending.wait` orders the current stream after the backend's, so a copy enqueued next reads the
received data, and the receive buffer can be freed once the copy is enqueued. The full matrices are
allocated only then, so a group in flight is in memory once.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lmlab.parallel.collectives import Pending, start_all_gather, start_mean_reduce_scatter
from lmlab.parallel.messages import check_dense

Location = tuple[nn.Module, str]
"""A module that holds a parameter, and the attribute name; a tied weight has several locations."""


class FSDPParam:
    """A parameter in two forms, shard and full; modules hold one of them at a time."""

    def __init__(
        self,
        name: str,
        parameter: nn.Parameter,
        locations: list[Location],
        compute_dtype: torch.dtype | None,
    ) -> None:
        self.name = name
        self.locations = locations
        self.shape = parameter.shape
        self.world_size = dist.get_world_size()
        self._rows = -(-self.shape[0] // self.world_size)
        rows = self.shard_of(parameter).detach().clone(memory_format=torch.contiguous_format)
        self.shard = nn.Parameter(rows, parameter.requires_grad)
        casts = compute_dtype and parameter.is_floating_point()
        self.padded = self._empty(compute_dtype if casts else parameter.dtype)
        self.full = nn.Parameter(self.padded[: self.shape[0]].data, parameter.requires_grad)
        self.padded_shard_size = self.padded.numel() // self.world_size
        """Elements of one rank's shard in a message."""
        self.free()
        self.install(self.shard)

    def shard_of(self, full: Tensor) -> Tensor:
        """This rank's rows; the last ranks may get fewer, or none."""
        first = dist.get_rank() * self._rows
        return full[first : first + self._rows]

    @property
    def allocated(self) -> bool:
        return self.padded.untyped_storage().nbytes() > 0

    def allocate(self) -> None:
        self.padded.untyped_storage().resize_(self.padded.nbytes)

    def free(self) -> None:
        self.padded.untyped_storage().resize_(0)

    def install(self, parameter: nn.Parameter) -> None:
        """Make the shard or the full matrix the parameter that modules hold."""
        for module, attribute in self.locations:
            module._parameters[attribute] = parameter

    def padded_shard(self, dtype: torch.dtype) -> Tensor:
        """The shard in `dtype`, contiguous and padded for sending."""
        shard = self.shard.detach()
        if shard.shape[0] == self._rows:
            return shard.to(dtype).contiguous()
        padded = shard.new_zeros((self._rows, *self.shape[1:]), dtype=dtype)
        padded[: shard.shape[0]] = shard
        return padded

    def pop_gradient(self) -> Tensor:
        """Detach the gradient of the full matrix from it, and pad it for sending."""
        gradient = self.full.grad
        assert gradient is not None, f"{self.name} has no gradient"
        self.full.grad = None
        check_dense(gradient)
        if self.padded.shape == self.shape:
            return gradient.contiguous()
        padded = gradient.new_zeros(self.padded.shape)
        padded[: self.shape[0]] = gradient
        return padded

    def without_padding(self, padded_shard: Tensor) -> Tensor:
        """This rank's actual rows in a padded shard."""
        return padded_shard.view(self._rows, *self.shape[1:])[: self.shard.shape[0]]

    @torch.no_grad()
    def gather(self) -> Tensor:
        """A full copy in the dtype of the shards; all ranks must call this."""
        full = self._empty(self.shard.dtype)
        start_all_gather(full, self.padded_shard(self.shard.dtype)).wait()
        return full[: self.shape[0]]

    def check_unchanged(self) -> None:
        """Raise if the module was moved after sharding, or its parameter replaced."""
        module, attribute = self.locations[0]
        current = module._parameters[attribute]
        if current is not self.shard or current.device != self.padded.device:
            raise ValueError(
                f"{self.name} must not be moved or replaced after sharding; move, cast and load a"
                " module before wrapping it"
            )

    def _empty(self, dtype: torch.dtype | None) -> Tensor:
        shape = (self._rows * self.world_size, *self.shape[1:])
        return torch.empty(shape, dtype=dtype, device=self.shard.device)


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
        """Clone an output if it is a view of a full matrix, which will be freed."""
        own = {p.padded.untyped_storage().data_ptr() for p in self._params_of[module]}
        return output.clone() if output.untyped_storage().data_ptr() in own else output

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
        self._gathering = start_all_gather(buffer, shards)

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
        """Install the shards and free the full matrices, after waiting for a gather in flight."""
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
        self._reducing = start_mean_reduce_scatter(output, packed.view(-1))

    @torch.no_grad()
    def finish_reduce(self) -> None:
        """Add mean gradients in flight, if any, to the gradients of the shards."""
        if self._reducing is None:
            return
        # One cast for the whole message; each shard's gradient is a view of the result.
        mean = self._reducing.wait().to(self.params[0].shard.dtype)
        self._reducing = None
        pieces = mean.split([param.padded_shard_size for param in self._sent])
        for param, piece in zip(self._sent, pieces, strict=True):
            own = param.without_padding(piece)
            param.shard.grad = own if param.shard.grad is None else param.shard.grad.add_(own)

    def _packed_shards(self) -> Tensor:
        """This rank's shards, in the compute dtype, packed into one message."""
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
