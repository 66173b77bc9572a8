"""One sharded matrix: the rows that this rank keeps, and memory for the full matrix.

Each rank keeps some rows as a parameter (`shard`, what the optimizer sees). For communication,
shards are padded to the same number of rows; concatenated in rank order they are the matrix.

Autograd saves the weight that a layer computed with, and so would keep every gathered matrix alive
from forward to backward. Therefore the full matrix is a single tensor (`full`, the leaf that
autograd knows) whose storage is resized to zero after use and refilled before backward reaches the
layer. It is written through an alias (`padded`, which includes the padding) with its own version
counter; otherwise autograd would report an in-place modification.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lmlab.parallel.checks import check_dense
from lmlab.parallel.collectives import Group, start_all_gather

Location = tuple[nn.Module, str]
"""A module that holds a parameter, and the attribute name; a tied weight has several locations."""


class FSDPParam:
    """A parameter in two forms, sharded and full, one of which is installed in the modules."""

    def __init__(
        self,
        name: str,
        parameter: nn.Parameter,
        locations: list[Location],
        compute_dtype: torch.dtype | None,
        group: Group,
    ) -> None:
        self.name = name
        self.locations = locations
        self.shape = parameter.shape
        self.group = group
        self.world_size = dist.get_world_size(group)
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
        """The rows of this rank; none if there are fewer rows than ranks."""
        first = dist.get_rank(self.group) * self._rows
        return full[first : first + self._rows]

    @property
    def allocated(self) -> bool:
        return self.padded.untyped_storage().nbytes() > 0

    def shares_memory(self, tensor: Tensor) -> bool:
        """Whether a tensor is a view of the full matrix, and would be lost when that is freed."""
        return tensor.untyped_storage().data_ptr() == self.padded.untyped_storage().data_ptr()

    def allocate(self) -> None:
        self.padded.untyped_storage().resize_(self.padded.nbytes)

    def free(self) -> None:
        self.padded.untyped_storage().resize_(0)

    def install(self, parameter: nn.Parameter) -> None:
        """Make the shard or the full matrix the parameter that modules hold."""
        for module, attribute in self.locations:
            module._parameters[attribute] = parameter

    def padded_shard(self, dtype: torch.dtype) -> Tensor:
        """The shard as it is sent."""
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
        """The rows of this rank's shard in what it has received."""
        return padded_shard.view(self._rows, *self.shape[1:])[: self.shard.shape[0]]

    @torch.no_grad()
    def gather(self) -> Tensor:
        """A full copy in the dtype of the shards; ranks call this together."""
        full = self._empty(self.shard.dtype)
        start_all_gather(full, self.padded_shard(self.shard.dtype), self.group).wait()
        return full[: self.shape[0]]

    def check_unchanged(self) -> None:
        """Moving a module gives its parameters other memory, or replaces them."""
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
