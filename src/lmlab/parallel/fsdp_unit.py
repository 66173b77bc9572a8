"""One matrix in shards: a parameter for the rows that a rank keeps, and memory for the whole.

Each rank keeps some rows as a parameter of its own (`shard`, what the optimizer sees; a matrix
still, so that rules which look at the number of dimensions hold). Rows are padded to the same
number on all ranks for communication only. Since rows of a matrix lie one after the other, the
shards of all ranks one after the other are the matrix.

The crux is memory. Autograd saves the weight it computed with, and would keep a gathered matrix
alive from forward to backward, which is all of them at once. So there is one tensor for the whole
matrix (`full`, the leaf that autograd knows), created once, and what comes and goes is its memory:
the storage is resized to nothing after use and filled again before backward reaches the layer. To
autograd it never changed. It is written through an alias (`whole`, padding included) with a version
counter of its own, since for autograd's in-place check filling it again would be a modification.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lmlab.parallel.collectives import Group, start_all_gather
from lmlab.parallel.hooks import check_dense

Home = tuple[nn.Module, str]
"""A module that holds a parameter, and the attribute it holds it in; a tied weight has several."""


class Unit:
    """A sharded parameter and its whole, of which one at a time stands in the modules."""

    def __init__(
        self,
        name: str,
        parameter: nn.Parameter,
        homes: list[Home],
        compute_dtype: torch.dtype | None,
        group: Group,
    ) -> None:
        self.name = name
        self.homes = homes
        self.shape = parameter.shape
        self.group = group
        self.ranks = dist.get_world_size(group)
        self._rows = -(-self.shape[0] // self.ranks)
        self.shard = self._cut(parameter)
        self.whole = self._room(compute_dtype or parameter.dtype)
        trainable = parameter.requires_grad
        self.full = nn.Parameter(self.whole[: self.shape[0]].data, requires_grad=trainable)
        self.part_size = self.whole.numel() // self.ranks
        """Numbers of this matrix in the part of a message that one rank sends or gets."""
        self.free_memory()
        self.install(self.shard)

    def _cut(self, whole: Tensor) -> nn.Parameter:
        """This rank's rows of a matrix, in memory of their own."""
        rows = self.rows_of(whole).detach().clone(memory_format=torch.contiguous_format)
        return nn.Parameter(rows, requires_grad=whole.requires_grad)

    def rows_of(self, whole: Tensor) -> Tensor:
        """The rows that this rank keeps; none if they run out before it."""
        first = dist.get_rank(self.group) * self._rows
        return whole[first : first + self._rows]

    @property
    def gathered(self) -> bool:
        """Whether the whole has memory, filled or being filled."""
        return self.whole.untyped_storage().nbytes() > 0

    @property
    def is_padded(self) -> bool:
        """Whether ranks do not divide the rows, so that the last ones keep fewer."""
        return self.whole.shape != self.shape

    def lends(self, tensor: Tensor) -> bool:
        """Whether a tensor lies in the whole's memory, with which it would lose its own."""
        memory = self.whole.untyped_storage().data_ptr()
        return tensor.untyped_storage().data_ptr() == memory

    def take_memory(self) -> None:
        """Have room for the whole; what is in it is undefined."""
        self.whole.untyped_storage().resize_(self.whole.nbytes)

    def free_memory(self) -> None:
        """Give the whole's memory back."""
        self.whole.untyped_storage().resize_(0)

    def install(self, parameter: nn.Parameter) -> None:
        """Make this the parameter that modules hold."""
        for module, attribute in self.homes:
            module._parameters[attribute] = parameter

    def outgoing(self, dtype: torch.dtype) -> Tensor:
        """The shard as it is sent: in the type asked for, padded to as many rows as the others."""
        shard = self.shard.detach()
        if shard.shape[0] == self._rows:
            return shard.to(dtype).contiguous()
        padded = shard.new_zeros((self._rows, *self.shape[1:]), dtype=dtype)
        padded[: shard.shape[0]] = shard
        return padded

    def take_gradient(self) -> Tensor:
        """The whole's gradient, which is then nobody else's, with as many rows as are sent."""
        gradient = self.full.grad
        assert gradient is not None, f"{self.name} has no gradient to send"
        self.full.grad = None
        check_dense(gradient)
        if not self.is_padded:
            return gradient.contiguous()
        padded = gradient.new_zeros(self.whole.shape)
        padded[: self.shape[0]] = gradient
        return padded

    def own_part(self, part: Tensor) -> Tensor:
        """Of a rank's part of a message, padding included, the rows of its shard."""
        return part.view(self._rows, *self.shape[1:])[: self.shard.shape[0]]

    @torch.no_grad()
    def gather_master(self) -> Tensor:
        """The whole in the type of the shards, in memory of its own. All ranks take part."""
        whole = self._room(self.shard.dtype)
        start_all_gather(whole, self.outgoing(self.shard.dtype), self.group).wait()
        return whole[: self.shape[0]]

    def check_untouched(self) -> None:
        """Moving a module gives its parameters other memory, or puts others in their place."""
        module, attribute = self.homes[0]
        held = module._parameters[attribute]
        if held is not self.shard or held.device != self.whole.device:
            raise ValueError(
                f"{self.name}: was moved or replaced after it was sharded; move, cast and load a"
                " module before wrapping it"
            )

    def _room(self, dtype: torch.dtype) -> Tensor:
        """Uninitialised memory for the padded whole."""
        shape = (self._rows * self.ranks, *self.shape[1:])
        return torch.empty(shape, dtype=dtype, device=self.shard.device)
